"""One typed call of a part's worker with a deadline, in any process; and protocols of the generators,
annotators, learner and runtime that the controller uses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from asyncrlhf.actors.episodes import EpisodeNews
from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import Collected, Offer
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.calls import under_way
from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.readahead.owners import ReaderHandle
from asyncrlhf.records.write.rollout_rows import RolloutRow
from asyncrlhf.records.write.spans import SpanBatch
from asyncrlhf.types import Annotation, GenerationRequest, Payload, Rollout, RolloutInfo

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)

# For a call that may take hours (a train step, an evaluation, a checkpoint), or that waits for time-outs of its
# own (a weight transfer). The run's supervisor pings the part meanwhile, and ends the call of a part
# that does not answer long before, within stall_timeout_seconds.
LONG_SECONDS = 24 * 3600.0
RECORD_WRITER = "the record writer"
DRIVER = "the driver"  # this process, beside the parts


# Takes what a part told of its time, and when the request left and its answer came, by the loop's clock.
Hear = Callable[[SpanBatch, float, float], None]


def ignore(batch: SpanBatch, sent: float, heard: float) -> None:
    """The default of ``Runtime.told``: spans are not recorded."""


class Remote(Protocol[W_co]):
    """A part whose worker, of class ``W``, may live in another process."""

    @property
    def name(self) -> str: ...

    async def ping(self, seconds: float) -> None:
        """Ping the part's process, even while it is busy; ReplicaError after ``seconds``."""
        ...

    async def call(
        self, seconds: float, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call the worker's ``method``, given as ``Worker.method``, and return its answer: ``await replica.call(60.0,
        GeneratorWorker.load, version, "keep")``.

        Raises the method's error; ReplicaError if the part is dead or has not answered after ``seconds``.
        """
        ...


async def within(seconds: float, name: str, verb: str, answer: Awaitable[R], ids: Sequence[int] = ()) -> R:
    """Await the ``answer`` of the part ``name`` to ``verb``, about the rollouts ``ids``. Raises ReplicaError if it does
    not come within ``seconds``, or if the run's supervisor ends the call."""
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
        """Does nothing: the part lives as long as this process."""

    async def close(self) -> None:
        """Close the worker, if it has open resources."""
        close = getattr(self.worker, "close", None)
        if close is not None:
            close()


class GeneratorHandle(Remote[GeneratorWorker], Protocol):
    """A generator replica: its worker's methods by ``call``, and methods of more than one call. Every method raises
    ReplicaError when the replica is lost."""

    @property
    def slots(self) -> int: ...

    @property
    def beat(self) -> float:
        """A number that changes whenever this process learns that the replica made tokens."""
        ...

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        """May return before the replica has the items; ``collect`` raises the errors of their arrival."""
        ...

    async def collect(self) -> Collected:
        """Wait until rollouts finish or a short time has passed."""
        ...

    async def submit_turns(self, turns: Sequence[Payload]) -> None:
        """As :meth:`submit`, for the requests behind these references: turns of episodes."""
        ...

    async def generate(self, items: Sequence[GenerationRequest]) -> list[Rollout]:
        """Sample outside of the ledger (evaluation): negative rollout ids, returned here and not by ``collect``."""
        ...

    async def generate_turn(self, rollout_id: int, turn: Payload) -> list[Rollout]:
        """As :meth:`generate`, for the turn of an episode behind a reference."""
        ...

    async def close(self) -> None: ...


class WorkerLostError(ReplicaError):
    """A part died and will not be restarted."""


class AnnotatorHandle(ReaderHandle, Protocol):
    """A reward, reference or critic worker."""

    @property
    def name(self) -> str: ...

    async def annotate(self, payloads: Sequence[Payload], ticket: Any = None) -> list[Annotation]:
        """One annotation per rollout. ``ticket``: of the critic version that a critic worker must use. Raises
        ReplicaError if the worker died in the call and was restarted, WorkerLostError if it was not."""
        ...

    async def close(self) -> None: ...


class EpisodesHandle(Protocol):
    """A worker that plays episodes. ``begin``, ``sampled`` and ``cancel`` wait for nothing, and arrive in their order:
    ``collect`` raises the errors of their arrival."""

    @property
    def name(self) -> str: ...

    def begin(self, items: Sequence[GenerationRequest]) -> None:
        """Play these episodes from the start."""
        ...

    def sampled(self, turns: Sequence[Payload]) -> None:
        """Give turns that were sampled to their episodes."""
        ...

    def cancel(self, rollout_ids: Sequence[int]) -> None: ...

    async def collect(self) -> EpisodeNews:
        """Wait for news, or until a short time has passed. Raises ReplicaError if the worker is lost."""
        ...

    async def restart(self, error: ReplicaError, counts: bool = True) -> None:
        """A new worker without episodes in place of the lost one. ``counts``: against ``max_restarts``. Raises
        WorkerLostError if it is not restarted."""
        ...

    async def close(self) -> None: ...


class LearnerHandle(Remote[LearnerWorker], Protocol):
    """The learner group as one part. Rank 0 answers ``call``; in the other methods all ranks act together. Every method
    raises LearnerLostError when a rank is lost."""

    async def train(self, rollouts: Sequence[RolloutInfo]) -> StepResult: ...

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        """Copy the present weights for publishing. The copy begins before any later call to the learner, even if the
        offer is not awaited. ``probe``: texts that the learner scores for the audit."""
        ...

    async def every(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """As ``call``, of all ranks."""
        ...

    async def save(self, folder: Path) -> None:
        """Copy the learner's state for a checkpoint; the next step may begin when this returns."""
        ...

    async def saved(self) -> Seals:
        """Wait until ``save``'s copy is on disk; returns the seals of its files, by their paths within the folder."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def close(self) -> None: ...


class Runtime(Protocol):
    """Starts the parts and connects them; the controller knows nothing of their processes and devices.

    ``references`` and ``critics`` are empty without ``reference.workers`` and ``critic.workers``, ``episodes`` if a
    rollout is one answer.
    ``sharing``: names of the generators on the learner's devices, which take turns with it. ``maps``: whether a replica
    loads from the learner's memory, so that a load's ticket is all that it needs. ``tell`` is called with the progress
    of the start, ``told`` with spans, ``survived`` with an annotator's name and death, after which it is asked again.
    """

    generators: list[GeneratorHandle]
    rewards: list[AnnotatorHandle]
    references: list[AnnotatorHandle]
    critics: list[AnnotatorHandle]
    episodes: list[EpisodesHandle]
    learner: LearnerHandle
    sharing: Collection[str]
    maps: bool = False
    told: Hear = staticmethod(ignore)  # set it before ``start``, and ``survived``
    survived: Callable[[str, ReplicaError], None] = staticmethod(lambda name, error: None)
    tell: Callable[[str], None]

    async def start(self) -> None: ...

    def parts(self) -> Sequence[Any]:
        """Every single part, with a ``name`` and a ``ping``."""
        return [*self.generators, *self.rewards, *self.references, *self.critics, *self.episodes, self.learner]

    async def connect(self, receivers: Sequence[GeneratorHandle], workers: int = 0) -> int:
        """Form a new weight group of the learner and these generators, and return its epoch. With ``workers`` that many
        engine workers of each generator join instead of the generator itself."""
        ...

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        """A new replica in place of a dead one, under the same name, without weights."""
        ...

    async def restart_learner(self) -> None:
        """A new learner group, with the initial model, in place of the dead one, whose ranks are all ended. Raises
        ReplicaError with the cause if it does not start."""
        ...

    async def add_generator(self, present: Collection[str]) -> GeneratorHandle | None:
        """One more replica, without weights, if ``max_replicas`` of a kind allows it and the machines have room; else
        None. ``present``: names of the run's replicas. Raises ReplicaError if it cannot start."""
        ...

    async def leaving(self) -> dict[str, tuple[str, float]]:
        """The parts, and ``DRIVER``, on nodes that go soon: by name the node and the seconds that it has left. The
        default is for one machine."""
        return {}

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        """The rollouts behind references, with the arrays of their annotations."""
        ...

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        """Write a Parquet file of record rows, each with text and arrays of the rollout behind its payload. Returns at
        once; the arrays never pass the controller's process."""
        ...

    def save_rollouts(self, target: Path, payloads: Sequence[Payload]) -> Future[None]:
        """As :meth:`write_part`, for a checkpoint: writes rollouts with their annotations' arrays."""
        ...

    async def written(self, files: Sequence[Future[None]], tell: Callable[[str], None]) -> None:
        """Wait for files of :meth:`write_part` and :meth:`save_rollouts`, written or failed. A writer that freezes
        meanwhile is replaced, of which ``tell`` gets a sentence. The default is for one that is a thread."""
        await off_loop(lambda: wait(files))

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        """Store rollouts of a checkpoint; returns references to them."""
        ...

    async def close(self) -> None: ...
