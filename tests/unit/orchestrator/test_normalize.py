"""Normalised rewards against NumPy on everything seen, and what the learner, its checkpoint and its metrics get."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.errors import CheckpointError
from asyncrlhf.orchestrator.normalize import STATE_FILE, RewardNormalizer, RunningMoments, normalized
from asyncrlhf.rewards.reward_config import RewardConfig
from tests.numeric import assert_close

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20)


@given(batches=st.lists(REWARDS, min_size=1, max_size=8))
def test_running_moments_are_those_of_everything_seen(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for number in range(len(batches)):
        moments.add(np.array(batches[number]))
        seen = np.concatenate([np.array(b) for b in batches[: number + 1]])
        assert moments.count == len(seen)
        assert_close(moments.mean, seen.mean(), atol=1e-8)
        assert_close(moments.spread, seen.std(), atol=1e-6)


def test_running_uses_this_batch_too_and_remembers() -> None:
    normalizer = RewardNormalizer(RewardConfig(normalize="running"))
    first, second = np.array([1.0, 3.0]), np.array([5.0, 7.0])
    assert_close(normalizer.normalize(first, [0, 0]), [-1, 1])
    whole = np.concatenate([first, second])
    assert_close(normalizer.normalize(second, [1, 1]), (second - whole.mean()) / whole.std())


def test_batch_and_group() -> None:
    rewards, groups = np.array([1.0, 2.0, 3.0, 10.0, 10.0, 4.0]), [5, 5, 5, 2, 2, 9]
    by_batch = RewardNormalizer(RewardConfig(normalize="batch")).normalize(rewards, groups)
    assert_close(by_batch, (rewards - rewards.mean()) / rewards.std())
    by_group = RewardNormalizer(RewardConfig(normalize="group")).normalize(rewards, groups)
    edge = (1.5) ** 0.5
    assert_close(by_group, [-edge, 0, edge, 0, 0, 0], what="no spread gives zeros, and so does a lonely sibling")


def test_the_clip_bounds_the_size() -> None:
    outlier = np.array([0.0] * 99 + [100.0])
    free = RewardNormalizer(RewardConfig(normalize="batch")).normalize(outlier, [0] * 100)
    held = RewardNormalizer(RewardConfig(normalize="batch", normalize_clip=2.0)).normalize(outlier, [0] * 100)
    assert free.max() > 9 and held.max() == 2.0 and (held[:99] == free[:99]).all()


class Inner:
    """A runtime and its learner in one."""

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = groups
        self.trained: list[list[float]] = []
        self.learner = self

    async def fetch(self, payloads: Sequence[Any]) -> list[Any]:
        from types import SimpleNamespace

        return [SimpleNamespace(group_id=self.groups[p.index]) for p in payloads]

    async def train(self, items: Sequence[Any]) -> Any:
        from asyncrlhf.learner.backend import StepResult

        self.trained.append([item.reward for item in items])
        return StepResult({"loss": 1.0})

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text("w")

    async def load(self, folder: Path) -> None:
        assert (folder / "weights").is_file()

    def snapshot(self) -> str:
        return "the inner one's"


def items(*rewards: float) -> list[Any]:
    from asyncrlhf.actors.messages import TrainItem
    from asyncrlhf.types import Payload

    return [TrainItem(Payload(None, i), reward, group_id=i // 2, tokens=2) for i, reward in enumerate(rewards)]


async def test_the_learner_trains_on_normal_rewards_and_its_checkpoint_holds_the_statistics(tmp_path: Path) -> None:
    config = RewardConfig(normalize="running")
    inner = Inner([0, 0, 0, 0])
    learner: Any = normalized(inner, config).learner  # type: ignore[arg-type]
    assert learner.snapshot() == "the inner one's"
    result = await learner.train(items(1, 3))
    assert inner.trained == [[-1.0, 1.0]]
    assert result.metrics == {"loss": 1.0, "normalized_reward_mean": 0.0, "normalized_reward_std": 1.0}
    await learner.save(tmp_path)
    await learner.train(items(5, 7))
    resumed_inner = Inner([0, 0])
    resumed: Any = normalized(resumed_inner, config).learner  # type: ignore[arg-type]
    await resumed.load(tmp_path)
    await resumed.train(items(5, 7))
    assert resumed_inner.trained[0] == inner.trained[1]
    (tmp_path / STATE_FILE).write_text("{torn")
    with pytest.raises(CheckpointError, match="reward statistics"):
        await resumed.load(tmp_path)
    (tmp_path / STATE_FILE).unlink()
    await resumed.load(tmp_path)  # of a run that did not normalise


def test_without_normalisation_nothing_stands_between() -> None:
    inner: Any = Inner([])
    assert normalized(inner, RewardConfig()) is inner
