"""The way from a generator to a score: collect loops, the reward queue, and how scoring is fused with generation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from asyncrlhf.errors import ReplicaError, RewardError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.chunking import Chunking
from asyncrlhf.orchestrator.handles import RewardHandle, WorkerLostError
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.types import RewardResult, RolloutInfo

# A rollout in so many calls that ended with their worker's death is what kills workers.
DEATHS_ALLOWED = 1


@dataclass(frozen=True)
class Waiting:
    """A generated rollout in the reward queue, and the learner's version when it arrived there."""

    info: RolloutInfo
    at_version: int


class Scoring:
    """``fusion.granularity`` says when a generated rollout may be scored: at once, with its group, with its batch.

    Of chunks (:class:`~asyncrlhf.orchestrator.chunking.Chunking`) it knows who should score what they belong to.
    """

    def __init__(
        self,
        state: RunState,
        assembly: Assembly,
        workers: list[RewardHandle],
        on_dead: Callable[[Replica, ReplicaError], None],
    ) -> None:
        self._state = state
        self._assembly = assembly
        self._workers = workers
        self._on_dead = on_dead
        self._chunks = Chunking(state, workers, assembly.message)
        self._ready: deque[Waiting] = deque()
        self._held: list[Waiting] = []
        self._suspects: deque[Waiting] = deque()  # they shared a call with a worker's death, and are scored alone
        self._deaths: dict[int, int] = {}  # by rollout id
        self._in_hand: set[int] = set()  # ids in calls under way

    @property
    def queued(self) -> list[int]:
        """Rollout ids that wait for a reward worker, or for its answer."""
        waiting = [*self._suspects, *self._ready, *self._held]
        return sorted(self._in_hand) + [w.info.rollout_id for w in waiting]

    async def collect(self, replica: Replica) -> None:
        """Take what this replica finishes, for as long as it lives."""
        busy_before, tokens_before = replica.busy_seconds, replica.tokens
        while True:
            try:
                collected = await replica.handle.collect()
            except ReplicaError as error:
                self._on_dead(replica, error)
                return
            if not replica.alive:
                return  # buried as hanging, and back before its end: what it held is issued again already
            replica.busy_seconds = busy_before + collected.busy_seconds
            replica.tokens = tokens_before + collected.tokens
            for failure in collected.failed:
                replica.in_flight.discard(failure.rollout_id)
                group_id = failure.rollout_id // self._state.config.num_generations
                self._assembly.failed(failure.rollout_id, group_id, failure.error, None)
            self._chunks.arrived(collected.chunks)
            for info in collected.finished:
                replica.in_flight.discard(info.rollout_id)
                if self._assembly.generated(info):
                    self._held.append(Waiting(info, self._finished_at(info)))
            if collected.finished or collected.failed:
                self._promote()
                self._state.progressed()

    def _finished_at(self, info: RolloutInfo) -> int:
        """The learner's version now; in the scheduled modes the version that the schedule has the generators at,
        which unlike the clock is the same in every run."""
        return info.max_version if self._state.scheduled else self._state.version

    def _promote(self) -> None:
        """Move what may be scored from ``held`` to ``ready``."""
        granularity = self._state.config.fusion.granularity
        if granularity in ("rollout", "chunk"):
            ready = self._held
        elif granularity == "group":
            whole = {g.group_id for g in self._state.groups.values() if not g.unfinished}
            ready = [w for w in self._held if w.info.group_id in whole]
        else:
            generating = any(g.unfinished for g in self._state.groups.values())
            full = len(self._held) >= self._state.config.batch_size
            ready = self._held if full or not generating else []
        chosen = {w.info.rollout_id for w in ready}
        self._held = [w for w in self._held if w.info.rollout_id not in chosen]
        self._ready.extend(ready)
        self._chunks.promised(len(ready))

    async def score(self, worker: RewardHandle) -> None:
        """One reward worker: micro-batches of up to ``fusion.max_batch``, gathered for ``fusion.max_wait_ms``.

        Returns when the worker is lost and others are left; raises ReplicaError when it was the last one, and
        RewardError for the first rollout without a score where ``reward.on_failure`` is ``stop``.
        """
        while True:
            await self._state.changed.wait_for(
                lambda: self._suspects or self._mine(worker) or self._chunks.has_work(worker)
            )
            batch = await self._next_batch(worker)
            if not batch:
                if not await self._read_ahead(worker):
                    return
                continue
            ids = {w.info.rollout_id for w in batch}
            self._in_hand |= ids
            try:
                results = await worker.score([w.info.payload for w in batch])
            except WorkerLostError as error:
                self._lose(worker, batch, error)
                return
            except ReplicaError as error:
                self._chunks.lost(worker)
                self._suspect(batch, error)
                continue
            finally:
                self._in_hand -= ids
            self._chunks.scored(worker, [w.info for w in batch])
            self._file(batch, {r.rollout_id: r for r in results})

    async def _read_ahead(self, worker: RewardHandle) -> bool:
        """Chunks for an idle worker; false when it is lost."""
        try:
            await self._chunks.read(worker)
        except WorkerLostError as error:
            self._lose(worker, [], error)
            return False
        except ReplicaError as error:
            self._chunks.lost(worker)
            self._assembly.message(f"{error} It had no rollout to score; what it read ahead is lost.")
        return True

    def _mine(self, worker: RewardHandle) -> list[Waiting]:
        """Up to ``fusion.max_batch`` rollouts that this worker may score, oldest first."""
        able = (w for w in self._ready if self._chunks.may_score(worker, w.info))
        return list(islice(able, self._state.config.fusion.max_batch))

    async def _next_batch(self, worker: RewardHandle) -> list[Waiting]:
        if self._suspects:
            return [self._suspects.popleft()]
        fusion = self._state.config.fusion
        more_to_come = any(r.in_flight for r in self._state.replicas)
        batch = self._mine(worker)
        if batch and len(batch) < fusion.max_batch and fusion.max_wait_ms > 0 and more_to_come:
            await asyncio.sleep(fusion.max_wait_ms / 1000)
            batch = self._mine(worker)
        taken = {w.info.rollout_id for w in batch}
        self._ready = deque(w for w in self._ready if w.info.rollout_id not in taken)
        return batch

    def _file(self, batch: list[Waiting], results: dict[int, RewardResult]) -> None:
        stop = self._state.config.reward.on_failure == "stop"
        for waiting in batch:
            rollout_id = waiting.info.rollout_id
            self._deaths.pop(rollout_id, None)
            self._assembly.scored(waiting.info, waiting.at_version, results[rollout_id])
            error = results[rollout_id].error
            if stop and error is not None:
                raise RewardError(f"Rollout {rollout_id} got no reward (reward.on_failure=stop): {error}")
        self._state.progressed()

    def _lose(self, worker: RewardHandle, batch: list[Waiting], error: ReplicaError) -> None:
        """Go on with the workers that are left."""
        self._workers.remove(worker)
        self._chunks.lost(worker)
        if not self._workers:
            raise ReplicaError(f"No reward worker is left: {error}")
        self._suspect(batch, error)

    def _suspect(self, batch: list[Waiting], error: ReplicaError) -> None:
        """Score each rollout of a call that died once more, alone; one that had its second chance has failed."""
        again = f" Its {len(batch)} rollouts are scored again, one by one." if batch else ""
        self._assembly.message(f"{error}{again}")
        for waiting in batch:
            rollout_id = waiting.info.rollout_id
            self._deaths[rollout_id] = self._deaths.get(rollout_id, 0) + 1
            if self._deaths[rollout_id] <= DEATHS_ALLOWED:
                self._suspects.append(waiting)
                continue
            cause = f"Its reward worker died {self._deaths.pop(rollout_id)} times with it: {error}"
            self._file([waiting], {rollout_id: RewardResult(rollout_id, None, error=cause)})
        self._state.progressed()
