"""A learner rank's calls run in threads of their own and may begin in any order: those asked for later wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, TimeoutError, wait
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.actors.learner import LearnerActor


class Worker:
    version = 0

    def __init__(self) -> None:
        self.done: list[str] = []

    def snapshot(self, probe: Any) -> str:
        if probe == "broken":
            raise ValueError(probe)
        self.done.append("snapshot")
        return "offer"

    def train(self, chosen: list[int]) -> int:
        self.done.append(f"train {len(chosen)}")
        return len(chosen)


@pytest.fixture
def actor() -> LearnerActor:
    spec: Any = SimpleNamespace(learner=SimpleNamespace(threads=1))
    actor = LearnerActor(spec, 0, 1)
    actor._worker = Worker()  # type: ignore[assignment]
    return actor


@pytest.mark.parametrize("probe", [None, "broken"])
def test_a_step_waits_for_the_snapshots_asked_for_before_it(actor: LearnerActor, probe: str | None) -> None:
    """A snapshot that fails holds nobody up."""
    with ThreadPoolExecutor(2) as pool:
        assert actor.call("train", [1], snapshots=0) == 1
        step = pool.submit(actor.call, "train", [2, 2], snapshots=1)
        with pytest.raises(TimeoutError):
            step.result(timeout=0.2)
        wait([pool.submit(actor.call, "snapshot", probe, snapshots=0)])
        assert step.result(timeout=60) == 2
    worker: Any = actor._worker
    assert worker.done == ["train 1", *(["snapshot"] if probe is None else []), "train 2"]
