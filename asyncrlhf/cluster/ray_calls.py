"""Calls of Ray actors: bounded, with the caller's kind of errors; and many rollouts by few object references."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrlhf.actors.messages import Address
from asyncrlhf.actors.where import Where
from asyncrlhf.cluster.ray_placement import free_in_ray
from asyncrlhf.cluster.remote import within
from asyncrlhf.errors import ReplicaError
from asyncrlhf.types import Payload

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")

START_SECONDS = 600.0
CLOSE_SECONDS = 5.0


async def ask(name: str, reference: Any, seconds: float, verb: str) -> Any:
    """Await the answer of the actor ``name`` to ``verb``. Its own exception comes out as it was raised; its death, and
    no answer within ``seconds``, as a ReplicaError."""
    return await within(seconds, name, verb, _translated(name, reference))


async def _translated(name: str, reference: Awaitable[Any]) -> Any:
    try:
        return await reference
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayActorError as error:
        lines = str(error).strip().splitlines()
        if error.actor_init_failed:  # the message is a traceback
            raise ReplicaError(f"{name} could not start: {lines[-1].strip()}") from None
        raise ReplicaError(f"{name} died: {lines[0]}") from None
    except RayError as error:
        raise ReplicaError(f"{name} did not answer: {type(error).__name__}: {str(error).splitlines()[0]}") from None


async def ask_to_start(name: str, reference: Any, seconds: float = START_SECONDS) -> Any:
    """As :func:`ask`, for a part that starts: Ray itself waits for ever for CPUs or GPUs that no machine has."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await _translated(name, reference)
    except TimeoutError:
        if not limit.expired():
            raise
        raise ReplicaError(f"{name} did not start within {seconds:g} s; free in Ray: {free_in_ray()}.") from None


class RayPart(Generic[W]):
    """A worker of class ``W`` in a Ray actor, which derives from :class:`~asyncrlhf.actors.part.PartActor`."""

    def __init__(self, name: str, actor: Any, start_seconds: float = START_SECONDS) -> None:
        self._name = name
        self.actor = actor
        self._start_seconds = start_seconds

    @property
    def name(self) -> str:
        return self._name

    async def ready(self) -> None:
        """Wait until the worker is built. Raises ReplicaError when it cannot be, or not in time."""
        await ask_to_start(self._name, self.actor.ready.remote(), self._start_seconds)

    async def where(self) -> Where:
        """Where Ray placed the actor."""
        place: Where = await ask(self._name, self.actor.where.remote(), self._start_seconds, "where")
        return place

    async def call(
        self, seconds: float, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As :class:`~asyncrlhf.cluster.remote.Remote`; Ray puts the objects in the place of object references."""
        verb = method.__name__
        answer: R = await ask(self._name, self.send(verb, *args, **kwargs), seconds, verb)
        return answer

    def send(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call whose answer is not awaited here; returns the reference to it."""
        return self.actor.call.remote(verb, *args, **kwargs)

    async def close(self) -> None:
        """Let the worker close what it holds open, then end its process in any case."""
        with suppress(ReplicaError, RayError):  # it is gone already, hangs, or failed to close
            await within(CLOSE_SECONDS, self._name, "close", self.actor.close.remote())
        ray.kill(self.actor)


def addressed(payloads: Sequence[Payload]) -> tuple[list[Address], list[Any]]:
    """The address of each rollout or chunk among the distinct object references behind ``payloads``, and these."""
    places: dict[Any, int] = {}

    def place(payload: Payload) -> tuple[int, int]:
        return places.setdefault(payload.ref, len(places)), payload.index

    addresses = [(place(p), *(place(annotation) for annotation in p.annotations)) for p in payloads]
    return addresses, list(places)
