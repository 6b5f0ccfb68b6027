"""Calls to the learner's ranks, which act together: when one dies, its death is the cause of the others' errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrlhf.errors import LearnerLostError, ReplicaError

R = TypeVar("R")
DEATH_SECONDS = 10.0  # until the runtime says of a dead process that it is dead


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
