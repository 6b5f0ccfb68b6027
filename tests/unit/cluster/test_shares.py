"""A step's batch on its way to the learner's ranks: each is sent its own share and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.cluster.ray_handles import RayLearner
from asyncrlhf.types import Payload, RolloutInfo


class Rank:
    """Stands for a rank's actor: keeps what it was sent."""

    name = "learner"

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    async def train(self, chosen: Any, *references: Any) -> str:
        self.sent = [(references[bundle], index, reward) for ((bundle, index),), reward, _, _ in chosen]
        self.references = set(references)
        return "done"


@pytest.mark.parametrize(("ranks", "shares"), [(1, 1), (3, 3), (4, 2), (8, 8)])
async def test_every_rollout_goes_to_the_ranks_of_one_share(ranks: int, shares: int) -> None:
    draws = np.random.default_rng(ranks)
    items = [
        RolloutInfo(
            i,
            i // 4,
            "g",
            1,
            int(draws.integers(1, 89)),
            0,
            0,
            "stop",
            0.0,
            Payload(f"bundle {i % 5}", i),
            reward=float(i),
        )
        for i in range(20)
    ]
    learner = RayLearner.__new__(RayLearner)
    learner.ranks, learner._shares = [Rank() for _ in range(ranks)], shares  # type: ignore[assignment]
    learner._spec = SimpleNamespace(recorded=lambda rollouts: {})  # type: ignore[assignment]
    assert await learner.train(items) == "done"
    size = ranks // shares
    for first in range(0, ranks, size):
        assert all(rank.sent == learner.ranks[first].sent for rank in learner.ranks[first : first + size])
    sent = [row for rank in learner.ranks[::size] for row in rank.sent]
    assert sorted(sent, key=lambda row: row[1]) == [
        (item.payload.ref, item.payload.index, item.reward) for item in items
    ]
    for rank in learner.ranks:
        assert {index // 4 for _, index, _ in rank.sent}.isdisjoint(
            {index // 4 for other in learner.ranks[::size] if other.sent != rank.sent for _, index, _ in other.sent}
        ), "a group lies on two shares"
        assert rank.references == {reference for reference, _, _ in rank.sent}, "bundles that it does not need"
