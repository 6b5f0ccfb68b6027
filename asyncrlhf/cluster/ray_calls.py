"""Calls of Ray actors: awaited with the caller's kind of errors, and many rollouts by few object references."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrlhf.cluster.ray_placement import free_in_ray
from asyncrlhf.errors import ReplicaError
from asyncrlhf.types import Payload

START_SECONDS = 600.0


async def ask(name: str, reference: Any) -> Any:
    """Await an actor's answer. Its own exception comes out as it was raised; its death as a ReplicaError."""
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
    """As :func:`ask`, but with an end: Ray itself waits for ever for CPUs or GPUs that no machine has."""
    try:
        return await asyncio.wait_for(ask(name, reference), seconds)
    except TimeoutError:
        raise ReplicaError(f"{name} did not start within {seconds:g} s; free in Ray: {free_in_ray()}.") from None


def bundle(payloads: Sequence[Payload]) -> tuple[list[Any], list[int]]:
    """The distinct object references behind payloads, and each payload's place among them."""
    places: dict[Any, int] = {}
    order = [places.setdefault(p.ref, len(places)) for p in payloads]
    return list(places), order


def addressed(payloads: Sequence[Payload]) -> tuple[list[tuple[int, int]], list[Any]]:
    """(bundle, index) of each rollout, and the bundles' references, as the services' actors take them."""
    references, places = bundle(payloads)
    return [(place, p.index) for place, p in zip(places, payloads, strict=True)], references
