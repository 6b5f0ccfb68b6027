"""A worker under Ray that dies or freezes: what its caller hears, and who answers next; with actors of paper."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.actors.messages import Told
from asyncrlhf.cluster import ray_handles
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.cluster.parts import answer_seconds
from asyncrlhf.cluster.ray_handles import RayAnnotator
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ReplicaError
from asyncrlhf.readahead.owners import Prefilled
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.types import Annotation

DEAD, FROZEN = "dead", "frozen"


class Scripted(RayAnnotator):
    """Its actors answer the calls as ``script`` says, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Any) -> None:
        self.script = list(script)
        self.started: list[str] = []
        self.killed: list[Any] = []
        monkeypatch.setattr(ray_handles.ray, "kill", self.killed.append)
        spec: Any = SimpleNamespace(kind="reward", answer_seconds=450.0, max_restarts=1)
        super().__init__(spec, 0, {}, start_seconds=60.0)

    def _start(self, name: str) -> Any:
        self.started.append(name)
        answer = SimpleNamespace(remote=lambda *_: self._next())
        both = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=lambda *_: (self._next(), "arrays")))
        ready = SimpleNamespace(remote=lambda: asyncio.sleep(5))
        return SimpleNamespace(annotate=both, prefill=answer, ready=ready)

    def _next(self) -> Awaitable[Any]:
        found = self.script.pop(0)

        async def answer() -> Any:
            if found == DEAD:
                raise ReplicaError("reward-0 died.")
            if found == FROZEN:
                await asyncio.sleep(1e9)
            return Told(found, []) if isinstance(found, list) else found

        return answer()


def test_a_worker_that_freezes_is_started_again_and_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        worker = Scripted(monkeypatch, FROZEN, [Annotation(7, 1.0)], FROZEN, FROZEN)
        frozen = worker.actor
        assert await worker.annotate([]) == [Annotation(7, 1.0)]
        assert asyncio.get_running_loop().time() == 450.0 + 5.0, "its time, and a start"
        assert worker.killed == [frozen] and worker.started == ["reward-0"] * 2
        with pytest.raises(WorkerLostError, match=r"annotate within 450 s .*\(max_restarts\)"):
            await worker.annotate([])

    run_virtual(main())


def test_a_death_that_a_second_call_hid_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the run, and to the reader of chunks: or these would go to a worker that has not their beginning, and count as
    read."""

    async def main() -> None:
        worker = Scripted(monkeypatch, DEAD, ["scores"], Prefilled(True), ["more scores"], Prefilled(True))
        monkeypatch.setattr(ray_handles, "placed", lambda annotations, arrays: annotations)
        survived: list[tuple[str, str]] = []
        worker.survived = lambda name, error: survived.append((name, str(error)))
        assert await worker.annotate([]) == ["scores"]
        with pytest.raises(ReplicaError, match="reward-0 died"):
            await worker.prefill([], [])
        assert (await worker.prefill([], [])).taken
        assert await worker.annotate([]) == ["more scores"]
        assert (await worker.prefill([], [])).taken
        assert survived == [("reward-0", "reward-0 died.")]

    run_virtual(main())


def test_two_calls_that_a_frozen_worker_held_start_it_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        worker = Scripted(monkeypatch, FROZEN, FROZEN, [Annotation(7, 1.0)], [Annotation(8, 1.0)])
        survived: list[str] = []
        worker.survived = lambda name, error: survived.append(name)
        both = await asyncio.gather(worker.annotate([]), worker.annotate([]))
        assert {annotation.rollout_id for (annotation,) in both} == {7, 8}
        assert worker.started == ["reward-0"] * 2 and worker.restarts == 1 and survived == ["reward-0"]

    run_virtual(main())


def test_no_honest_call_is_cut_off() -> None:
    config = RunConfig(stall_timeout_seconds=1000.0)
    assert answer_seconds(config) == 5000.0 == answer_seconds(config, 300.0)
    own = RunConfig(stall_timeout_seconds=60.0, reward=RewardConfig(model_timeout_seconds=3000.0))
    assert answer_seconds(own, own.reward.model_timeout_seconds) > 3000.0, "the model's own limit is heard first"
