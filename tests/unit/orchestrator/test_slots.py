"""The dispatcher's look costs no search: free slots, paces and signals against the plain definitions."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from asyncrlhf.cluster.clock import Signal, off_loop, run_virtual
from asyncrlhf.orchestrator.learning.meters import LoopLag
from asyncrlhf.orchestrator.replicas.free_slots import FreeSlots
from asyncrlhf.orchestrator.replicas.pacing import Rates
from asyncrlhf.orchestrator.state import Replica


def make_replica(number: int, slots: int = 4) -> Replica:
    return Replica(SimpleNamespace(name=f"generator-{number}", slots=slots), version=0)  # type: ignore[arg-type]


def able(replica: Replica) -> bool:
    return replica.takes_work and len(replica.in_flight) < 1.25 * replica.handle.slots


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_most_free_replica_is_the_one_that_a_search_finds(data: st.DataObject) -> None:
    replicas = [make_replica(i, data.draw(st.integers(1, 6))) for i in range(5)]
    slots = FreeSlots(able)
    for replica in replicas:
        slots.offer(replica)
    for _ in range(data.draw(st.integers(1, 40))):
        replica = replicas[data.draw(st.integers(0, 4))]
        deed = data.draw(st.sampled_from(["begin", "end", "drain", "slow", "die", "clear"]))
        if deed == "begin":  # fewer free slots: nobody is told
            replica.begin(max(replica.in_flight, default=0) + 1, 0.0, 0)
        elif deed == "end" and replica.in_flight:
            replica.end(min(replica.in_flight), 1.0, finished=True)
            slots.offer(replica)
        elif deed == "drain":
            replica.draining = not replica.draining
            slots.offer(replica)
        elif deed == "slow":
            replica.pace.slow = not replica.pace.slow
            slots.offer(replica)
        elif deed == "die":
            replica.alive = False
        elif deed == "clear":
            slots.clear()
            for each in replicas:
                slots.offer(each)
        for slow in (False, True):
            found = slots.most(slow=slow)
            open_ = [r for r in replicas if able(r) and r.pace.slow == slow]
            assert (found[-1] if found else None) is max(open_, key=lambda r: r.free_slots, default=None)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, 0.5, 1.0, 2.0])), min_size=1, max_size=30))
def test_a_replica_is_held_against_the_others(changes: list[tuple[int, float | None]]) -> None:
    replicas, rates = [make_replica(i) for i in range(5)], Rates()
    for number, latency in changes:
        replicas[number].pace.latency = latency
        rates.note(replicas[number])
    for replica in replicas:
        others = [r for r in replicas if r.pace.latency and r is not replica]
        rate = sum(r.handle.slots / (r.pace.latency or 1.0) for r in others)
        fastest = min((r.pace.latency or 0.0 for r in others), default=0.0)
        expected = max(fastest, 8 / rate) if others else None
        found = rates.reference(replica, 8)
        assert found == (None if expected is None else pytest.approx(expected))


def test_a_broad_signal_wakes_those_of_its_parts_and_not_the_other_way_round() -> None:
    async def main() -> list[str]:
        woken: list[str] = []
        part = Signal()
        whole = Signal(part)

        async def wait(name: str, signal: Signal) -> None:
            await signal.wait_past(signal.count)
            woken.append(name)

        tasks = [asyncio.create_task(wait("part", part)), asyncio.create_task(wait("whole", whole))]
        await asyncio.sleep(0)
        part.notify()
        await asyncio.sleep(0.1)
        assert woken == ["part"]
        tasks.append(asyncio.create_task(wait("part again", part)))
        await asyncio.sleep(0)
        whole.notify()
        await asyncio.gather(*tasks)
        seen = part.count
        part.notify()
        await part.wait_past(seen)  # what came before the wait is not lost
        return woken

    assert sorted(run_virtual(main())) == ["part", "part again", "whole"]


def test_the_lag_of_a_blocked_loop_shows_and_work_beside_it_does_not_block() -> None:
    async def main() -> dict[str, float]:
        lag = LoopLag()
        await asyncio.sleep(0.12)
        lag.step()
        turned = threading.Event()
        asyncio.get_running_loop().call_later(0.05, turned.set)
        assert await off_loop(lambda: turned.wait(60.0)), "the loop turns beside the work"
        ends = time.monotonic() + 0.4
        while time.monotonic() < ends:
            pass
        await asyncio.sleep(0.1)
        return lag.step()

    blocked = asyncio.run(main())
    assert blocked["loop_lag_p99"] > 0.3
    # The machine's clock has ticks of 10 ms.
    assert blocked["shared_cpu_seconds"] > blocked["controller_cpu_seconds"] - 0.05 > 0.0 == blocked["remote_calls"]

    async def virtual() -> dict[str, float]:
        lag = LoopLag()
        await asyncio.sleep(5.0)
        return lag.step()

    assert run_virtual(virtual()) == {}
