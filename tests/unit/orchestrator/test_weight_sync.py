"""The publisher orders its own snapshot, at once, with the probe where an audit is due; a death is filed once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import Offer
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import LearnerLostError, ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.replicas.audits import PROBE_TEXTS
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.state import Replica, RunState


class Learner:
    """Notes what it is asked for, in order; its snapshots are ready when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ready = asyncio.Event()

    def snapshot(self, probe: Any) -> Any:
        self.asked.append(("snapshot", None if probe is None else len(probe)))

        async def offer() -> Offer:
            await self.ready.wait()
            return Offer(seconds=0.5, probe_logprobs=None)

        return offer()


async def nothing_else() -> None:
    return None


def made(*overrides: str) -> tuple[RunState, Learner, WeightPublisher]:
    state = build_state(load_config(["runtime=local", *overrides]))
    learner = Learner()
    runtime: Any = SimpleNamespace(learner=learner, maps=False)
    return state, learner, WeightPublisher(state, runtime, 20, nothing_else)


async def test_the_snapshot_is_ordered_before_publish_returns() -> None:
    state, learner, publisher = made("weights.audit_every=2")
    for version, probe in ((0, PROBE_TEXTS), (1, None), (2, PROBE_TEXTS)):
        publisher.publish(version)
        assert learner.asked[-1] == ("snapshot", probe) and publisher.busy
        with pytest.raises(AssertionError, match="still under way"):
            publisher.publish(version)
        assert len(learner.asked) == version + 1
        learner.ready.set()
        await publisher.idle()
        assert state.published_version == version and publisher.snapshot_seconds == 0.5
        learner.ready.clear()


class Joining:
    """A restarted replica, which loads nothing but what it has received."""

    name, workers = "generator-0", 0

    def __init__(self) -> None:
        self.staged = -1

    async def call(self, seconds: float, method: Any, *given: Any) -> None:
        if method is GeneratorWorker.receive:
            self.staged = given[0].version
        else:
            assert method is GeneratorWorker.load and given[0] == self.staged, (given[0], self.staged)


class Publishing(Learner):
    """Whose first ticket is asked for before the next snapshot and arrives after it."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.tickets = asyncio.Event(), 0

    async def call(self, seconds: float, method: Any, *given: Any) -> Any:
        if method is LearnerWorker.ticket:
            self.tickets += 1
            version = len(self.asked) - 1
            if self.tickets == 1:
                await self.late.wait()
            return SimpleNamespace(version=version, manifest=SimpleNamespace(bucket_bytes=(8,)))
        return None


async def test_a_replica_that_rejoins_while_a_publish_begins_loads_what_it_receives() -> None:
    state, _, publisher = made()
    learner = Publishing()
    publisher._runtime = SimpleNamespace(
        learner=learner, connect=lambda handles: nothing_else(), sharing=(), maps=False
    )
    learner.ready.set()
    publisher.publish(0)
    await publisher.idle()
    replica = Replica(Joining())  # type: ignore[arg-type]
    replica.alive = False
    rejoin = asyncio.create_task(publisher.rejoin(replica))
    while not learner.tickets:
        await asyncio.sleep(0)
    learner.ready.clear()
    publisher.publish(1)
    learner.late.set()
    for _ in range(20):
        await asyncio.sleep(0)
    learner.ready.set()
    await publisher.idle()
    await asyncio.wait_for(rejoin, 10)
    assert replica.version == state.published_version == 1


class Mapping:
    """A replica that notes its calls, and whose loads fail if told so."""

    name = "generator-0"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.fails = False

    async def call(self, seconds: float, method: Any, *given: Any) -> None:
        self.calls.append((method.__name__, given[0], given[2].version))
        if self.fails:
            raise WeightSyncError("the memory cannot be mapped")


async def test_a_replica_that_maps_the_learners_memory_is_called_once_per_publish() -> None:
    """With the ticket. If it cannot map the memory because the learner died, the learner's death is the reason."""
    state, _, publisher = made()
    learner, handle = Publishing(), Mapping()
    learner.late.set()
    asked: list[str] = []
    call = learner.call

    async def noted(seconds: float, method: Any, *given: Any) -> Any:
        asked.append(method.__name__)
        if handle.fails and asked.count("ticket") == 4:
            raise LearnerLostError("learner-0 died")
        return await call(seconds, method, *given)

    learner.call = noted  # type: ignore[method-assign]
    publisher._runtime = SimpleNamespace(learner=learner, connect=lambda handles: nothing_else(), sharing=(), maps=True)
    state.replicas.append(Replica(handle))  # type: ignore[arg-type]
    learner.ready.set()
    for version in (0, 1):
        publisher.publish(version)
        await publisher.idle()
    assert handle.calls == [("load", 0, 0), ("load", 1, 1)] and asked == ["ticket", "ticket"]
    handle.fails = True
    publisher.publish(2)
    with pytest.raises(LearnerLostError):
        await publisher.idle()
    publisher._task = None
    publisher.publish(3)
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        await publisher.idle()


async def test_a_death_is_filed_once() -> None:
    state, _, _ = made()
    said: list[str] = []
    state.message = said.append
    replica = Replica(SimpleNamespace(name="generator-0"), version=3)  # type: ignore[arg-type]
    state.replicas.append(replica)
    state.died(replica, ReplicaError("struck"))
    state.died(replica, ReplicaError("struck again"))
    assert (replica.alive, replica.version) == (False, -1) and len(said) == 1
    assert await state.dead.get() is replica
    assert state.dead.empty()
