"""Awaits answers of Ray actors: each with a deadline, and Ray's failures converted to the project's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrlhf.cluster.calls import START, under_way
from asyncrlhf.cluster.handles import within
from asyncrlhf.cluster.ray_placement import free_in_ray
from asyncrlhf.errors import AsyncRLHFError, ConfigError, RefusedStartError, ReplicaError

START_SECONDS = 600.0
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
        return ReplicaError(f"{name} died: {lines[0]}")
    return ReplicaError(f"{name} did not answer: {type(error).__name__}: {lines[0]}")


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
