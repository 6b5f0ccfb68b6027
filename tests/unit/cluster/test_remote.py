"""A typed call of a worker: here and in an actor it has an end, and errors come out as they were raised."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.actors.part import PartActor
from asyncrlhf.cluster.calls import keep_calls
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import LONG_SECONDS, LocalPart, Remote
from asyncrlhf.cluster.ray_handles import RayPart
from asyncrlhf.errors import ReplicaError, WeightSyncError


class Worker:
    """What a part does; ``hang`` alone is a coroutine."""

    def add(self, first: int, second: int = 1) -> int:
        return first + second

    def fail(self) -> None:
        raise WeightSyncError("version 3 was not received")

    def own_timeout(self) -> None:
        raise TimeoutError("the socket's own")

    async def hang(self) -> None:
        await asyncio.sleep(1000)


class Actor(PartActor):
    def __init__(self) -> None:
        self._worker = Worker()


def in_actor() -> RayPart[Worker]:
    """A part whose actor is called as Ray calls it, in this process."""
    actor = Actor()

    async def answer(*arguments: Any, **keywords: Any) -> Any:
        found = actor.call(*arguments, **keywords)
        return await found if asyncio.iscoroutine(found) else found

    return RayPart("part-0", SimpleNamespace(call=SimpleNamespace(remote=answer)))


@pytest.mark.parametrize("build", [lambda: LocalPart("part-0", Worker()), in_actor], ids=["local", "actor"])
def test_a_call_returns_raises_and_ends(build: Any) -> None:
    async def main() -> None:
        part: Remote[Worker] = build()
        loop = asyncio.get_running_loop()
        assert await part.call(5, Worker.add, 2) == 3 and await part.call(5, Worker.add, 2, second=5) == 7
        with pytest.raises(WeightSyncError, match="version 3 was not received"):
            await part.call(5, Worker.fail)
        with pytest.raises(TimeoutError, match="the socket's own"):
            await part.call(5, Worker.own_timeout)
        assert loop.time() == 0, "a method that is no coroutine costs no virtual time"
        with pytest.raises(ReplicaError, match=r"^part-0 did not answer hang within 5 s$"):
            await part.call(5, Worker.hang)
        assert loop.time() == 5

    run_virtual(main())


def test_a_method_is_found_by_its_name_so_that_another_worker_can_stand_in() -> None:
    class Stub:
        async def add(self, first: int, second: int = 1) -> int:
            await asyncio.sleep(3)
            return 100

    async def main() -> None:
        part: Any = LocalPart("part-0", Stub())
        assert await part.call(5, Worker.add, 2) == 100 and asyncio.get_running_loop().time() == 3
        await part.close()

    run_virtual(main())


def test_a_call_that_is_given_up_ends_with_the_verdict() -> None:
    """Its table says who is asked for what since when, and forgets what has ended."""

    async def main() -> None:
        calls, part = keep_calls(), LocalPart("part-0", Worker())
        asked = asyncio.create_task(part.call(LONG_SECONDS, Worker.hang))
        await asyncio.sleep(3)
        (call,) = calls.of("part-0")
        assert (call.verb, call.since) == ("hang", 0)
        call.end("part-0 gave no sign of life")
        call.end("a second verdict")
        with pytest.raises(ReplicaError, match=r"^part-0 gave no sign of life$"):
            await asked
        assert asyncio.get_running_loop().time() == 3 and not list(calls)

    run_virtual(main())
