"""Awaits answers of Ray actors: each with a deadline, and Ray's failures converted to the project's errors.

Those of the learner's ranks are awaited together: when one dies, its death is the cause of the others' errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrlhf.cluster.calls import START, under_way
from asyncrlhf.cluster.handles import R, within
from asyncrlhf.cluster.ray_placement import free_in_ray
from asyncrlhf.errors import AsyncRLHFError, ConfigError, LearnerLostError, RefusedStartError, ReplicaError
from asyncrlhf.shortages import memory_kills, smaller

START_SECONDS = 600.0
DEATH_SECONDS = 10.0  # until Ray says of a dead process that it is dead
REFUSED = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "  # how a traceback names it


async def ask(name: str, reference: Any, seconds: float, verb: str) -> Any:
    """Await the answer of the actor ``name`` to ``verb``. The actor's own exception is raised, with a note that names
    the actor where it is none of the project's; its death, or no answer within ``seconds``, raises ReplicaError."""
    return await within(seconds, name, verb, _translated(name, reference))


async def _translated(name: str, reference: Awaitable[Any]) -> Any:
    try:
        return await reference
    except RayError as error:
        raise translated(name, error) from None


def translated(name: str, error: RayError) -> Exception:
    """The exception that the actor ``name`` raised, or a ReplicaError for its death or silence."""
    lines = str(error).strip().splitlines()
    if isinstance(error, RayTaskError):  # whose own message is a traceback
        cause = error.cause if isinstance(error.cause, Exception) else error
        if not isinstance(cause, AsyncRLHFError):
            cause.add_note(f"in {name}")
        return cause
    if isinstance(error, RayActorError):
        if error.actor_init_failed:  # the message is a traceback
            last = lines[-1].strip()
            if last.startswith(REFUSED):
                return RefusedStartError(last.removeprefix(REFUSED))
            return ReplicaError(f"{name} could not start: {last}")
        return ReplicaError(f"{name} died: {_with_memory(name, str(error))}")
    return ReplicaError(f"{name} did not answer: {type(error).__name__}: {_with_memory(name, str(error))}")


class _Kills:
    """How often the kernel had killed for memory when it was last looked at."""

    known = memory_kills()


def _with_memory(name: str, said: str) -> str:
    """The first line of what Ray said, and of memory if that was the cause."""
    first = said.strip().splitlines()[0]
    further = of_memory(name, said)
    return f"{first.removesuffix('.')}.{further}" if further else first


def of_memory(name: str, said: str = "") -> str:
    """A further sentence where the kernel, or Ray before it, ended a process for memory since the death before."""
    before, _Kills.known = _Kills.known, memory_kills()
    short = _Kills.known > before or "low on memory" in said
    return f" Memory was short; it needs less {smaller(name)}." if short else ""


async def ask_to_start(name: str, reference: Any, seconds: float = START_SECONDS) -> Any:
    """As :func:`ask`, for a part that starts: Ray itself waits for ever for CPUs or GPUs that no machine has."""
    try:
        async with asyncio.timeout(seconds) as limit:
            with under_way(name, START, (), limit):
                return await _translated(name, reference)
    except TimeoutError:
        if not limit.expired():
            raise
        raise ReplicaError(f"{name} did not start within {seconds:g} s; free in Ray: {free_in_ray()}.") from None


@contextmanager
def a_rank() -> Iterator[None]:
    """Calls within this context go to a rank of the learner: its loss is the loss of the whole group."""
    try:
        yield
    except ReplicaError as error:
        raise LearnerLostError(str(error)) from None


async def together(answers: Sequence[Awaitable[R]]) -> list[R]:
    """Await the answers of ranks that act together. When one fails, wait a moment for the others: a rank whose peer
    died raises its collective's error first, and the death is the cause."""
    asked = [asyncio.ensure_future(answer) for answer in answers]
    try:
        _, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        deadline = asyncio.get_running_loop().time() + DEATH_SECONDS
        while waiting and not any(_lost(one) for one in asked):
            left = deadline - asyncio.get_running_loop().time()
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        for one in sorted((one for one in asked if one.done()), key=_lost, reverse=True):
            one.result()
        return [one.result() for one in asked]
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def first(answers: Sequence[Awaitable[R]]) -> R:
    """The first of several answers, after all have come."""
    return (await together(answers))[0]


def _lost(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and not answer.cancelled() and isinstance(answer.exception(), LearnerLostError)
