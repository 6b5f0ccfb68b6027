"""``async.on_weight_update=pull`` on the virtual clock: who loads when, and what a slow, hanging or dead one costs."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalRuntime
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError, ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.controller import Controller

bench = importlib.import_module("experiments.39_pull.bench")
PULL, PUSH = "async.on_weight_update=pull", "async.on_weight_update=in_flight"
EVEN = bench.WORLDS["both sides equal"]
Event = tuple[float, str, dict[str, Any]]


def watched(events: list[Event], then: Callable[[LocalRuntime, Controller], None] = lambda runtime, run: None) -> Any:
    """A meddler that keeps the journal's events about weights, with their times."""

    def meddle(runtime: LocalRuntime, run: Controller) -> None:
        note = run.state.journal.note

        def kept(event: str, **facts: Any) -> None:
            events.append((run.state.now(), event, facts))
            note(event, **facts)

        run.state.journal.note = kept  # type: ignore[method-assign]
        then(runtime, run)

    return meddle


def published(events: list[Event]) -> dict[int, float]:
    return {facts["version"]: at for at, event, facts in events if event == "published"}


def loads(events: list[Event], replica: str) -> list[int]:
    return [facts["version"] for _, event, facts in events if event == "loaded" and facts["replica"] == replica]


@pytest.mark.more
@pytest.mark.in_turn
@pytest.mark.parametrize("world", ["generators are slower", pytest.param("learner is slower", marks=pytest.mark.more)])
def test_pull_is_as_fast_as_push_and_no_staler(world: str) -> None:
    pull, push = (bench.figures(bench.imitate(bench.WORLDS[world], "steps=40", way), 64) for way in (PULL, PUSH))
    assert pull["rollouts_per_second"] >= 0.9999 * push["rollouts_per_second"]
    assert pull["staleness_mean"] <= push["staleness_mean"] + 1e-3
    assert pull["staleness_max"] <= 2


def test_nothing_begins_with_weights_older_than_those_of_the_machine() -> None:
    """Unless the replica loaded a moment ago. The versions of what begins are those that were published before."""
    events: list[Event] = []
    begun: list[tuple[float, int]] = []

    def then(runtime: LocalRuntime, run: Controller) -> None:
        start = run.state.ledger.start

        def started(rollout_id: int, name: str, version: int) -> None:
            begun.append((run.state.now(), version))
            start(rollout_id, name, version)

        run.state.ledger.start = started  # type: ignore[method-assign]

    bench.imitate(EVEN, "steps=30", PULL, meddle=watched(events, then))
    times = published(events)
    stale = [(at, held) for at, held in begun if held < max(v for v, since in times.items() if since < at)]
    assert len(begun) > 1500 and stale == []


@pytest.mark.in_turn
@pytest.mark.more
def test_one_that_loads_slowly_delays_only_itself() -> None:
    """The others get every version as fast as if it were not there; it skips some, and still works."""
    events: list[Event] = []
    world = bench.World(train=1.55, slow={"generator-3": 5.0})
    slow = bench.imitate(world, "steps=40", PULL, meddle=watched(events))
    times = published(events)
    assert all(times[v + 1] - times[v] < 4.9 for v in range(10, 38)), "a publish waited for a load"
    brisk, lame = (loads(events, name) for name in ("generator-0", "generator-3"))
    assert len(brisk) > 35 and 5 < len(lame) < 25
    push = bench.imitate(world, "steps=40", PUSH)
    assert slow.metrics[-1]["wall_time"] < 0.9 * push.metrics[-1]["wall_time"]
    assert slow.metrics[-1]["staleness_max"] <= 2


def at_load(
    version: int, name: str, act: Callable[[LocalGenerator], Any]
) -> Callable[[LocalRuntime, Controller], None]:
    """``act`` takes the place of the load of a version, or a later one, by a replica, once."""

    def then(runtime: LocalRuntime, run: Controller) -> None:
        (handle,) = (h for h in runtime.generators if h.name == name)
        assert isinstance(handle, LocalGenerator)
        load: Any = handle.worker.load

        async def struck(asked: int, *arguments: Any) -> None:
            if asked < version:
                return await load(asked, *arguments)
            handle.worker.load = load  # type: ignore[method-assign]
            await act(handle)

        handle.worker.load = struck  # type: ignore[assignment]

    return then


async def hang(handle: LocalGenerator) -> None:
    await asyncio.sleep(1e6)


async def die(handle: LocalGenerator) -> None:
    handle.kill("struck")
    raise ReplicaError(f"{handle.name} is dead: struck")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["generator-0", "generator-2"], ids=["holder", "neighbour"])
@pytest.mark.parametrize("act", [hang, die])
@pytest.mark.more_but(every=3)
def test_one_that_hangs_or_dies_in_a_pull_is_replaced_and_the_others_go_on(act: Any, name: str) -> None:
    """Nothing is lost, no publish waits for it, and it joins again with what its machine holds."""
    events: list[Event] = []
    meddle = watched(events, at_load(10, name, act))
    ran = bench.imitate(EVEN, "steps=30", PULL, "weights.timeout_seconds=20", meddle=meddle)
    (died,) = (at for at, event, facts in events if event == "died")
    (joined,) = ((at, facts["version"]) for at, event, facts in events if event == "joined")
    struck = next(at for at, event, facts in events if event == "load" and facts["version"] == 10)
    times = published(events)
    assert sum(struck < at < died for at in times.values()) >= (5 if act is hang else 0), "publishes waited"
    assert joined[0] >= died and joined[1] >= max((v for v, at in times.items() if at < died), default=0)
    assert len(ran.metrics) == 30
    ran.state.ledger.check()


def test_a_machine_whose_holder_is_not_started_again_gets_the_version_from_the_learner() -> None:
    events: list[Event] = []
    meddle = watched(events, at_load(10, "generator-0", die))
    ran = bench.imitate(EVEN, "steps=30", PULL, "max_restarts=0", meddle=meddle)
    assert [facts["replica"] for _, event, facts in events if event == "died"] == ["generator-0"]
    assert len(ran.metrics) == 30 and loads(events, "generator-1")[-1] == 30


def test_one_that_joins_late_loads_what_its_machine_holds_without_a_transfer() -> None:
    events: list[Event] = []
    sent: list[tuple[str, int]] = []

    def then(runtime: LocalRuntime, run: Controller) -> None:
        call = LocalGenerator.call

        async def told(self: LocalGenerator, seconds: float, method: Any, /, *given: Any) -> Any:
            if method.__name__ == "receive":
                sent.append((self.name, given[0].version))
            return await call(self, seconds, method, *given)

        patch.setattr(LocalGenerator, "call", told)
        at_load(10, "generator-2", die)(runtime, run)

    with pytest.MonkeyPatch.context() as patch:
        bench.imitate(EVEN, "steps=30", PULL, meddle=watched(events, then))
    assert any(event == "joined" for _, event, _ in events)
    assert sent == [("generator-0", version) for version in range(31)]


def test_a_pull_that_fails_for_another_reason_ends_the_run() -> None:
    async def fail(handle: LocalGenerator) -> None:
        raise WeightSyncError("Bucket 3 of version 10 arrived damaged")

    with pytest.raises(WeightSyncError, match="Bucket 3 of version 10"):
        bench.imitate(EVEN, "steps=30", PULL, meddle=at_load(10, "generator-2", fail))


def test_all_hold_the_last_version_when_the_run_ends() -> None:
    events: list[Event] = []
    ran = bench.imitate(EVEN, "steps=15", PULL, meddle=watched(events))
    assert {replica.version for replica in ran.state.replicas} == {15}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("async=sync",), "async.on_weight_update=pull .* async.mode=sync needs one exact version"),
        (("async=fixed_lag",), "async.on_weight_update=pull .* async.mode=fixed_lag needs one exact version"),
        (("weights.transport=auto",), "which weights.transport=auto does not keep; allowed: weights.transport=relay"),
        (("runtime=ray", "cluster.placement=flatten"), "cluster.placement=flatten they sleep then"),
    ],
)
def test_what_cannot_pull_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(["runtime=local", "weights.transport=relay", PULL, *overrides])
