"""A typed call of a worker: here and in an actor it has an end, errors come out as they were raised, and a verdict ends
the call that it is about."""

from __future__ import annotations

import asyncio
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrlhf.actors.part import PartActor
from asyncrlhf.cluster.calls import keep_calls
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import LONG_SECONDS, LocalPart, Remote, within
from asyncrlhf.cluster.ray_calls import ask, translated
from asyncrlhf.cluster.ray_handles import RayPart
from asyncrlhf.errors import (
    ConfigError,
    RefusedStartError,
    ReplicaError,
    RewardError,
    WeightSyncError,
    failure_sentence,
)


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
        call.end("a verdict that comes too late")
        assert asyncio.get_running_loop().time() == 3 and not list(calls)
        assert call.verdict == "part-0 gave no sign of life"

    run_virtual(main())


def test_a_verdict_that_comes_after_the_answer_changes_nothing() -> None:
    async def asked() -> None:
        table, answer = keep_calls(), asyncio.get_running_loop().create_future()
        waits = asyncio.create_task(within(60.0, "generator-0", "load", answer))
        await asyncio.sleep(0)
        call = table.of("generator-0")[0]
        answer.set_result(7)
        assert await waits == 7
        call.end("generator-0 gave no sign of life")
        assert not call.verdict

    asyncio.run(asked())


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (RuntimeError("can't start new thread\nmore"), "RuntimeError: can't start new thread (in reward-0)"),
        (RewardError("the judge answers nonsense"), "the judge answers nonsense"),
    ],
)
def test_the_sentence_of_a_run_names_the_actor_that_raised_what_is_not_ours(raised: Exception, sentence: str) -> None:
    async def asked() -> None:
        keep_calls()
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(RayTaskError("score", "a traceback", raised))
        with pytest.raises(type(raised)) as caught:
            await ask("reward-0", answer, 60.0, "score")
        assert failure_sentence(caught.value) == sentence

    asyncio.run(asked())


def test_what_a_part_refuses_at_its_start_is_the_users_sentence() -> None:
    """A model that the engine cannot pass right ends the run with exit code 2, like any wrong setting."""
    said = "generator.engine=hf cannot run XForCausalLM: it is never right; choose another model."
    for error, kind, code in ((ConfigError(said), RefusedStartError, 2), (RuntimeError(said), ReplicaError, 1)):
        trace = "Traceback (most recent call last):\n" + "".join(traceback.format_exception(error))
        found = translated("generator-0", ActorDiedError(cause=RayTaskError("__init__", trace, error)))
        assert type(found) is kind and isinstance(found, ReplicaError) and found.exit_code == code
        assert said in str(found) and ("could not start" in str(found)) == (code == 1)
