"""Replicas whose workers take the weights themselves: a group each, one transfer at a time, and what a death costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import LearnerLostError, ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.replicas.direct_load import DirectLoads
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.types import WeightManifest


class Handle:
    def __init__(self, name: str) -> None:
        self.name = name
        self.epochs: list[int] = []  # of the tickets that it was given

    async def call(self, seconds: float, method: Callable[..., Any], ticket: Ticket) -> None:
        self.epochs.append(ticket.epoch)


class Learning:
    """A runtime whose learner sends, or fails to; at most one transfer may be under way."""

    def __init__(self) -> None:
        self.learner = self
        self.formed: list[tuple[str, int]] = []
        self.sending = 0
        self.most = 0
        self.error: BaseException | None = None

    async def connect(self, receivers: list[Handle], workers: int) -> int:
        self.formed.append((receivers[0].name, workers))
        return len(self.formed)

    async def call(self, seconds: float, method: Callable[..., Any], ticket: Ticket) -> None:
        self.sending += 1
        self.most = max(self.most, self.sending)
        await asyncio.sleep(0)
        self.sending -= 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def made() -> tuple[RunState, Learning, DirectLoads, list[Replica]]:
    settings = ["runtime=ray", "generator.engine=vllm", "generator.replicas=2", "weights.transport=collective"]
    state = build_state(load_config([*settings, "generator.vllm.tensor_parallel_size=2"]))
    state.message = lambda text: None
    replicas = [Replica(Handle(f"generator-{i}")) for i in range(2)]  # type: ignore[arg-type]
    state.replicas.extend(replicas)
    runtime: Any = Learning()
    return state, runtime, DirectLoads(state, runtime), replicas


async def newest() -> Ticket:
    return Ticket(1, 99, WeightManifest((), ()))


async def loaded() -> None:
    await asyncio.sleep(0)


async def test_each_replica_has_a_group_that_outlives_the_others_death() -> None:
    _, runtime, loads, replicas = made()
    assert all(loads.serves(r) for r in replicas)
    for _ in range(2):
        await asyncio.gather(*(loads.load(r, newest, loaded) for r in replicas))
    assert runtime.formed == [("generator-0", 2), ("generator-1", 2)] and runtime.most == 1
    assert [r.handle.epochs for r in replicas] == [[1, 1], [2, 2]]  # type: ignore[attr-defined]
    replicas[0].handle = Handle("generator-0")  # type: ignore[assignment]
    await asyncio.gather(*(loads.load(r, newest, loaded) for r in replicas))
    assert runtime.formed[2:] == [("generator-0", 2)], "the other group was formed anew"
    loads.forget()
    await loads.load(replicas[1], newest, loaded)
    assert runtime.formed[3:] == [("generator-1", 2)]


async def half_loaded() -> None:
    raise WeightSyncError("worker 1: a bucket is missing")


async def dead_meanwhile() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "load", "cause"),
    [
        (LostReceiversError("Version 1", {"generator-0/1": "died"}), dead_meanwhile, "1 died"),
        (WeightSyncError("No group to send version 1 to."), dead_meanwhile, "No group"),
        (ReplicaError("its process is gone"), dead_meanwhile, "its process is gone"),
        (None, half_loaded, "a bucket is missing"),
    ],
    ids=["lost", "refused", "gone", "torn"],
)  # fmt: skip
async def test_a_replica_without_the_whole_version_is_reported_dead_and_the_rest_goes_on(
    error: BaseException | None, load: Callable[[], Any], cause: str
) -> None:
    state, runtime, loads, replicas = made()
    runtime.error = error
    await loads.load(replicas[0], newest, load)
    assert [r.alive for r in replicas] == [False, True] and cause in replicas[0].cause
    assert await state.dead.get() is replicas[0]
    await loads.load(replicas[1], newest, loaded)
    assert replicas[1].alive


async def test_the_learners_death_is_nobody_elses() -> None:
    _, runtime, loads, replicas = made()
    runtime.error = LearnerLostError("learner-0 died")
    with pytest.raises(LearnerLostError):
        await loads.load(replicas[0], newest, dead_meanwhile)
    assert all(r.alive for r in replicas)
