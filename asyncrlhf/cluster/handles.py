"""One typed, bounded call of a part's worker, wherever the part runs; and protocols of the generators, annotators,
learner and runtime that the controller uses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import Collected, Offer
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.calls import under_way
from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.learner_config import StepResult
from asyncrlhf.readahead.owners import ReaderHandle
from asyncrlhf.records.rollout_rows import RolloutRow
from asyncrlhf.records.spans import SpanBatch
from asyncrlhf.types import Annotation, GenerationRequest, Payload, Rollout, RolloutInfo

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)

# For a call that may rightly take hours (a train step, an evaluation, a checkpoint), or that waits for time-outs of its
# own (a weight transfer). The run's supervisor asks the part for a sign of life meanwhile, and ends the call of a part
# that gives none long before, within stall_timeout_seconds.
LONG_SECONDS = 24 * 3600.0


# Takes what a part told of its time, and when the request left and its answer came, by the loop's clock.
Hear = Callable[[SpanBatch, float, float], None]


def ignore(batch: SpanBatch, sent: float, heard: float) -> None:
    """The timeline is not recorded."""


class Remote(Protocol[W_co]):
    """A part whose worker, of class ``W``, may live in another process."""

    @property
    def name(self) -> str: ...

    async def ping(self, seconds: float) -> None:
        """A sign of life of the part's process, whatever it is busy with; ReplicaError without one in ``seconds``."""
        ...

    async def call(
        self, seconds: float, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Have the worker run ``method``, given as ``Worker.method`` and found on the worker by its name, and return
        its answer: ``await replica.call(60.0, GeneratorWorker.load, version, "keep")``.

        Raises what the method raised; ReplicaError when the part is dead or has not answered after ``seconds``.
        """
        ...


async def within(seconds: float, name: str, verb: str, answer: Awaitable[R], ids: Sequence[int] = ()) -> R:
    """The ``answer`` of the part ``name`` to ``verb``, about the rollouts ``ids``; ReplicaError when it does not come
    within ``seconds``, or when the run's supervisor gives the call up."""
    try:
        async with asyncio.timeout(seconds) as limit:
            with under_way(name, verb, ids, limit) as call:
                return await answer
    except TimeoutError:
        if not limit.expired():  # the part's own
            raise
        raise ReplicaError(call.verdict or f"{name} did not answer {verb} within {seconds:g} s") from None


class LocalPart(Generic[W]):
    """A worker in this process. Virtual time passes during a call only if the worker's method is a coroutine."""

    def __init__(self, name: str, worker: W) -> None:
        self.name = name
        self.worker = worker

    async def call(
        self, seconds: float, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        answer: Any = getattr(self.worker, method.__name__)(*args, **kwargs)
        if inspect.isawaitable(answer):
            answer = await within(seconds, self.name, method.__name__, answer)
        return answer

    async def ping(self, seconds: float) -> None:
        """It lives as long as this process does."""

    async def close(self) -> None:
        """Close the worker, if it holds anything open."""
        close = getattr(self.worker, "close", None)
        if close is not None:
            close()


class GeneratorHandle(Remote[GeneratorWorker], Protocol):
    """A generator replica: its worker's methods by ``call``, and what is more than a call. Every method raises
    ReplicaError when the replica is gone."""

    @property
    def slots(self) -> int: ...

    @property
    def beat(self) -> float:
        """Another number whenever the replica has made tokens, as far as is known here."""
        ...

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        """Returns before the replica has the items, perhaps; ``collect`` raises what it raised over them."""
        ...

    async def collect(self) -> Collected:
        """Waits until something finished or a short while passed."""
        ...

    async def generate(self, items: Sequence[GenerationRequest]) -> list[Rollout]:
        """Samples outside the ledger (evaluation): negative rollout ids, answered here and not by ``collect``."""
        ...

    async def close(self) -> None: ...


class WorkerLostError(ReplicaError):
    """A part died and will not be started again."""


class AnnotatorHandle(ReaderHandle, Protocol):
    """A reward, reference or critic worker."""

    @property
    def name(self) -> str: ...

    async def annotate(self, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        """One annotation a rollout. ``ticket``: of the critic that a critic worker is to answer as. Raises ReplicaError
        when the worker died of it and stands again, WorkerLostError when it does not."""
        ...

    async def close(self) -> None: ...


class LearnerHandle(Remote[LearnerWorker], Protocol):
    """The learner group as one part. ``call`` is answered by rank 0; in the other methods all ranks act together.
    Every method raises LearnerLostError when a rank is gone."""

    async def train(self, rollouts: Sequence[RolloutInfo]) -> StepResult: ...

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        """Copy the present weights aside for publishing. What the learner is asked for after this call finds the copy
        begun, whether the offer was awaited or not. ``probe``: texts that the offer is to score, for the audit."""
        ...

    async def every(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """As ``call``, of all ranks."""
        ...

    async def save(self, folder: Path) -> None:
        """Copy aside what a checkpoint needs of the learner, which may take its next step when this returns."""
        ...

    async def saved(self) -> Seals:
        """Wait until what ``save`` copied is on disk; the seals of its files, by their paths within the folder."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def close(self) -> None: ...


class Runtime(Protocol):
    """Starts the parts and wires their transport; the controller sees nothing below this line.

    ``references`` and ``critics`` are empty without ``reference.where=service`` and ``critic.where=service``.
    ``sharing``: names of the generators on the learner's devices, which take turns with it. ``tell`` is called with how
    far the start is, ``told`` is given what parts tell of their time.
    """

    generators: list[GeneratorHandle]
    rewards: list[AnnotatorHandle]
    references: list[AnnotatorHandle]
    critics: list[AnnotatorHandle]
    learner: LearnerHandle
    sharing: Collection[str]
    told: Hear = staticmethod(ignore)  # set it before ``start``
    tell: Callable[[str], None]

    async def start(self) -> None: ...

    def parts(self) -> Sequence[Any]:
        """Every part by itself, each with a ``name`` and a ``ping``."""
        return [*self.generators, *self.rewards, *self.references, *self.critics, self.learner]

    async def connect(self, receivers: Sequence[GeneratorHandle], workers: int = 0) -> int:
        """Form a new weight group of the learner and these generators, and return its epoch. With ``workers`` it is
        that many workers of each that enter, and not the replica."""
        ...

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        """A fresh replica in a dead one's place, under the same name, holding no weights yet."""
        ...

    async def restart_learner(self) -> None:
        """A fresh learner group in the dead one's place, with the initial model; of the dead one no rank is left.
        Raises ReplicaError when it does not start, naming what is missing."""
        ...

    async def add_generator(self, present: Collection[str]) -> GeneratorHandle | None:
        """One replica more, holding no weights yet, where ``max_replicas`` lets a kind of replica grow and the machines
        have room; else None. ``present`` names those that the run counts on. Raises ReplicaError when it cannot start.
        """
        ...

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        """The rollouts behind references, with the arrays of their annotations."""
        ...

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        """Write a Parquet file of record rows, each with text and arrays of the rollout behind its payload. Returns at
        once, and the arrays never pass the controller's process."""
        ...

    def save_rollouts(self, target: Path, payloads: Sequence[Payload]) -> Future[None]:
        """Write the rollouts behind references, with the arrays of their annotations, for a checkpoint; otherwise as
        :meth:`write_part`."""
        ...

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        """References to rollouts read back from a checkpoint."""
        ...

    async def close(self) -> None: ...
