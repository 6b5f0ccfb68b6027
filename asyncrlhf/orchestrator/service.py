"""Workers that share a queue of finished rollouts and outlive each other: of rewards, reference and critic."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.chunking import Chunking
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.rewards.chunked_messages import ChunkInfo
from asyncrlhf.types import RolloutInfo

# A rollout in so many calls that ended with their worker's death is what kills workers.
DEATHS_ALLOWED = 1


@dataclass(frozen=True)
class Waiting:
    """A generated rollout in a service's queue, and the learner's version when it arrived there."""

    info: RolloutInfo
    at_version: int


class HasRollout(Protocol):
    @property
    def rollout_id(self) -> int: ...


Worker = TypeVar("Worker")
Result = TypeVar("Result", bound=HasRollout)


class Service(ABC, Generic[Worker, Result]):
    """``title``: what its workers are called in sentences. With ``chunks`` they read ahead while they are idle."""

    title: str

    def __init__(
        self, state: RunState, assembly: Assembly, workers: list[Worker], chunks: Chunking[Any] | None = None
    ) -> None:
        self._state = state
        self._chunks = chunks
        self._assembly = assembly
        self._workers = workers  # alive
        self._ready: deque[Waiting] = deque()
        self._suspects: deque[Waiting] = deque()  # they shared a call with a worker's death, and are asked for alone
        self._deaths: dict[int, int] = {}  # by rollout id
        self._in_hand: set[int] = set()  # ids in calls under way
        self._calls = 0  # under way

    @property
    def queued(self) -> list[int]:
        """Rollout ids that wait for a worker, or for its answer."""
        return sorted(self._in_hand) + [w.info.rollout_id for w in [*self._suspects, *self._ready]]

    async def serve(self, worker: Worker) -> None:
        """One worker, call by call. Returns when it is lost and others are left; raises ReplicaError when it was the
        last one."""
        while True:
            await self._state.queue.wait_for(
                lambda: self._suspects or self._mine(worker) or self._may_read_ahead(worker)
            )
            batch = await self._next_batch(worker)
            if not batch:
                if not await self._read_ahead(worker):
                    return
                continue
            ids = {w.info.rollout_id for w in batch}
            self._in_hand |= ids
            self._calls += 1
            try:
                results = await self._call(worker, batch)
            except WorkerLostError as error:
                self._lose(worker, batch, error)
                return
            except ReplicaError as error:
                self._forgot(worker)
                self._suspect(batch, error)
                continue
            finally:
                self._in_hand -= ids
                self._calls -= 1
            if self._chunks is not None:
                self._chunks.answered(worker, [w.info for w in batch])
            self._file(batch, {r.rollout_id: r for r in results})

    @abstractmethod
    def _mine(self, worker: Worker) -> list[Waiting]:
        """What this worker would be asked for now: one call's worth, oldest first."""

    @abstractmethod
    def _full(self, worker: Worker, batch: Sequence[Waiting]) -> bool:
        """Whether a call cannot take more, so that there is no reason to wait for company."""

    @abstractmethod
    async def _call(self, worker: Worker, batch: Sequence[Waiting]) -> list[Result]:
        """Raises ReplicaError when the worker died of it and stands again, WorkerLostError when it does not."""

    @abstractmethod
    def _accept(self, waiting: Waiting, result: Result) -> None:
        """Take one rollout's result."""

    @abstractmethod
    def _failure(self, rollout_id: int, cause: str) -> Result:
        """The result of a rollout that killed its workers."""

    def chunks_arrived(self, chunks: Sequence[ChunkInfo]) -> None:
        """Of rollouts under way; without effect where nobody reads ahead."""
        if self._chunks is not None:
            self._chunks.arrived(chunks)

    def _may_take(self, worker: Worker, waiting: Waiting) -> bool:
        """Whether the rollout need not wait for the worker that read its beginning."""
        return self._chunks is None or self._chunks.may_take(worker, waiting.info)

    def _may_read_ahead(self, worker: Worker) -> bool:
        return self._chunks is not None and self._chunks.has_work(worker)

    async def _read_ahead(self, worker: Worker) -> bool:
        """Chunks for an idle worker; false when it is lost."""
        if self._chunks is None:
            return True
        try:
            await self._chunks.read(worker)
        except WorkerLostError as error:
            self._lose(worker, [], error)
            return False
        except ReplicaError as error:
            self._forgot(worker)
            self._assembly.message(f"{error} So what it read ahead is lost.")
        return True

    def _forgot(self, worker: Worker) -> None:
        """The worker died: what it had read ahead is gone."""
        if self._chunks is not None:
            self._chunks.lost(worker)

    async def _next_batch(self, worker: Worker) -> list[Waiting]:
        """Gathered for ``fusion.max_wait_ms`` while more can come; of suspects one alone."""
        if self._suspects:
            return [self._suspects.popleft()]
        wait_ms = self._state.config.fusion.max_wait_ms
        more_to_come = any(r.in_flight for r in self._state.replicas)
        batch = self._mine(worker)
        if batch and not self._full(worker, batch) and wait_ms > 0 and more_to_come:
            await asyncio.sleep(wait_ms / 1000)
            batch = self._mine(worker)
        taken = {w.info.rollout_id for w in batch}
        self._ready = deque(w for w in self._ready if w.info.rollout_id not in taken)
        return batch

    def _file(self, batch: list[Waiting], results: dict[int, Result]) -> None:
        for waiting in batch:
            self._deaths.pop(waiting.info.rollout_id, None)
            self._accept(waiting, results[waiting.info.rollout_id])
        self._state.progressed(self._state.queue)

    def _lose(self, worker: Worker, batch: list[Waiting], error: ReplicaError) -> None:
        """Go on with the workers that are left."""
        self._workers.remove(worker)
        self._forgot(worker)
        if not self._workers:
            raise ReplicaError(f"No {self.title} is left: {error}")
        self._suspect(batch, error)

    def _suspect(self, batch: list[Waiting], error: ReplicaError) -> None:
        """Ask for each rollout of a call that died once more, alone; one that had its second chance has failed."""
        again = f" Its {len(batch)} rollouts are scored again, one by one." if batch else ""
        self._assembly.message(f"{error}{again}")
        for waiting in batch:
            rollout_id = waiting.info.rollout_id
            self._deaths[rollout_id] = self._deaths.get(rollout_id, 0) + 1
            if self._deaths[rollout_id] <= DEATHS_ALLOWED:
                self._suspects.append(waiting)
                continue
            cause = f"Its {self.title} died {self._deaths.pop(rollout_id)} times with it: {error}"
            self._file([waiting], {rollout_id: self._failure(rollout_id, cause)})
        self._state.progressed()
