"""A typed call of a worker: here and in an actor it has an end, and errors come out as they were raised."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.actors.part import PartActor
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import LocalPart, Remote
from asyncrlhf.cluster.ray_handles import SILENT_SECONDS, RayGenerator, RayPart
from asyncrlhf.config.run_config import RunConfig
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


def test_a_replica_that_is_silent_is_named() -> None:
    """Its look for results never ends, as that of a stopped process; the run's watch would have spoken before."""
    assert 1.1 * RunConfig().stall_timeout_seconds < SILENT_SECONDS

    async def main() -> None:
        never = asyncio.get_running_loop().create_future()
        collect = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=lambda: (never, None)))
        generator = RayGenerator.__new__(RayGenerator)
        RayPart.__init__(generator, "generator-0", SimpleNamespace(collect=collect))
        generator.spec, generator._submitted = SimpleNamespace(chunk_tokens=0), []  # type: ignore[assignment]
        with pytest.raises(ReplicaError, match=f"^generator-0 did not answer collect within {SILENT_SECONDS:g} s$"):
            await generator.collect()

    run_virtual(main())
