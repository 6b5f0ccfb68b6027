"""One typed, bounded call of a part's worker, wherever the part runs; and the call of a part in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from asyncrlhf.errors import ReplicaError

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)

# For a call that may rightly take hours (a train step, an evaluation, a checkpoint), or that waits for time-outs of its
# own (a weight transfer). If such a call hangs, the run's watch ends the run long before, after stall_timeout_seconds.
LONG_SECONDS = 24 * 3600.0


class Remote(Protocol[W_co]):
    """A part whose worker, of class ``W``, may live in another process."""

    @property
    def name(self) -> str: ...

    async def call(
        self, seconds: float, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Have the worker run ``method``, given as ``Worker.method`` and found on the worker by its name, and return
        its answer: ``await replica.call(60.0, GeneratorWorker.load, version, "keep")``.

        Raises what the method raised; ReplicaError when the part is dead or has not answered after ``seconds``.
        """
        ...


async def within(seconds: float, name: str, verb: str, answer: Awaitable[R]) -> R:
    """The ``answer`` of the part ``name`` to ``verb``; ReplicaError when it does not come within ``seconds``."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await answer
    except TimeoutError:
        if not limit.expired():  # the part's own
            raise
        raise ReplicaError(f"{name} did not answer {verb} within {seconds:g} s") from None


class LocalPart(Generic[W]):
    """A worker in this process. Virtual time passes during a call only if the worker's method is a coroutine."""

    def __init__(self, name: str, worker: W) -> None:
        self._name = name
        self.worker = worker

    @property
    def name(self) -> str:
        return self._name

    async def call(
        self, seconds: float, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        answer: Any = getattr(self.worker, method.__name__)(*args, **kwargs)
        if inspect.isawaitable(answer):
            answer = await within(seconds, self._name, method.__name__, answer)
        result: R = answer
        return result

    async def close(self) -> None:
        """Close the worker, if it holds anything open."""
        close = getattr(self.worker, "close", None)
        if close is not None:
            close()
