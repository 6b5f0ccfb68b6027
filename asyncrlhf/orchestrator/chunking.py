"""The way of chunks (``fusion.granularity=chunk``): which worker reads which sequence ahead of its end.

A worker is asked to read ahead only while no finished rollout waits for it, and for a moment at a time, so that such a
one waits for no more than that. All of this may be lost or wrong without changing a score or a log-prob.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

from asyncrlhf.cluster.handles import ReaderHandle
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.state import GroupInProgress, PrefillTotals, RunState
from asyncrlhf.rewards.chunked_messages import ChunkInfo, Prefilled
from asyncrlhf.types import RolloutInfo

SWEEP_SECONDS = 1.0
CALL_SECONDS = 0.02  # of reading ahead in one call, as far as a chunk can be so short: what a finished rollout may wait
PATIENCE_SECONDS = 1.0  # after which another worker takes what waits for the one with its cache

Reader = TypeVar("Reader", bound=ReaderHandle)


class Chunking(Generic[Reader]):
    """Every sequence under way belongs to the worker that got its first chunk, the one with fewest of them.

    Args:
        who: reads, as sentences name it.
        workers: those alive; the same list as the service's.
        given: of a group under way, the rollouts that have what the workers give.
        totals: where what was read is counted.
    """

    def __init__(
        self,
        who: str,
        state: RunState,
        workers: Sequence[Reader],
        given: Callable[[GroupInProgress], Container[int]],
        totals: PrefillTotals,
        message: Callable[[str], None],
    ) -> None:
        self._who = who
        self._state = state
        self._message = message
        self._workers = workers
        self._given = given
        self._totals = totals
        self._owner: dict[int, Reader] = {}  # by rollout id
        self._waiting: dict[Reader, deque[ChunkInfo]] = {worker: deque() for worker in workers}
        self._read: dict[int, int] = {}  # tokens that the owner holds, by rollout id
        self._spoilt: set[int] = set()  # they were in a call that ended with its worker's death
        self._tokens_per_second: dict[Reader, float] = {}
        self._refusing: set[Reader] = set()
        self._swept: dict[Reader, float] = {}

    def arrived(self, chunks: Sequence[ChunkInfo]) -> None:
        """Of one generator's look. Those of rollouts that ended meanwhile are passed over."""
        able = [worker for worker in self._workers if worker not in self._refusing]
        if not chunks or not able:
            return
        loads = Counter(self._owner.values())
        for chunk in chunks:
            if not self._is_under_way(chunk.rollout_id) or chunk.rollout_id in self._spoilt:
                continue
            owner = self._owner.get(chunk.rollout_id)
            if owner is None and chunk.start > 0:
                continue  # its worker was lost, and another would miss what came before
            if owner is None:
                owner = self._owner[chunk.rollout_id] = min(able, key=loads.__getitem__)
                loads[owner] += 1
            self._waiting[owner].append(chunk)
        # A worker that is never idle reads none, and they hold on to their tokens.
        for waiting in self._waiting.values():
            while waiting and not self._is_under_way(waiting[0].rollout_id):
                waiting.popleft()
        self._state.queue.notify()

    def _is_under_way(self, rollout_id: int) -> bool:
        group = self._state.groups.get(rollout_id // self._state.config.num_generations)
        return group is not None and rollout_id in group.unfinished

    def _is_wanted(self, rollout_id: int) -> bool:
        group = self._state.groups.get(rollout_id // self._state.config.num_generations)
        return group is not None and rollout_id in group.unscored and rollout_id not in self._given(group)

    def may_take(self, worker: Reader, info: RolloutInfo) -> bool:
        """Its owner, anybody where it has none, and anybody after a while."""
        owner = self._owner.get(info.rollout_id)
        return owner is None or owner is worker or self._state.now() - info.generated_at >= PATIENCE_SECONDS

    def owns(self, worker: Reader, info: RolloutInfo) -> bool:
        return self._owner.get(info.rollout_id) is worker

    def read_by(self, worker: Reader, info: RolloutInfo) -> int:
        """Tokens that this worker need not read any more."""
        return self._read.get(info.rollout_id, 0) if self.owns(worker, info) else 0

    def promised(self, infos: Sequence[RolloutInfo]) -> None:
        """These rollouts are at their end: look again when patience with their owners is over."""
        if len(self._workers) > 1 and any(info.rollout_id in self._owner for info in infos):
            # A little later than that: a clock's difference may come out a rounding error too short.
            asyncio.get_running_loop().call_later(1.001 * PATIENCE_SECONDS, self._state.queue.notify)

    def has_work(self, worker: Reader) -> bool:
        """Chunks at once; what is to be forgotten is looked for now and then, for that takes a look at everything."""
        if self._waiting.get(worker):
            return True
        now = self._state.now()
        if worker in self._refusing or now - self._swept.get(worker, -math.inf) < SWEEP_SECONDS:
            return False
        self._swept[worker] = now
        return bool(self._unwanted(worker))

    def _unwanted(self, worker: Reader) -> list[int]:
        """Rollouts of this worker that were cancelled, failed, dropped, or answered by another."""
        return [i for i, owner in self._owner.items() if owner is worker and not self._is_wanted(i)]

    async def read(self, worker: Reader) -> None:
        """One call of work for an idle worker. Raises ReplicaError when it died of it."""
        released = self._unwanted(worker)
        for rollout_id in released:
            self._forget(rollout_id)
        chunks = self._next(worker)
        if not chunks and not released:
            return
        started = self._state.now()
        try:
            answer = await worker.prefill(released, chunks)
        except ReplicaError:
            suspects = self._spoilt | {chunk.rollout_id for chunk in chunks}
            self._spoilt = {rollout_id for rollout_id in suspects if self._is_wanted(rollout_id)}
            raise
        self._file(worker, chunks, answer, self._state.now() - started)

    def _next(self, worker: Reader) -> list[ChunkInfo]:
        """Oldest first, as much as takes ``CALL_SECONDS``, and at least one chunk."""
        waiting = self._waiting[worker]
        budget = CALL_SECONDS * self._tokens_per_second.get(worker, 0.0)
        chunks: list[ChunkInfo] = []
        tokens = 0
        while waiting and (not chunks or tokens + waiting[0].length <= budget):
            chunk = waiting.popleft()
            if self._is_under_way(chunk.rollout_id):  # else its end is in the queue, with all of its tokens
                chunks.append(chunk)
                tokens += chunk.length
        return chunks

    def _file(self, worker: Reader, chunks: list[ChunkInfo], answer: Prefilled, seconds: float) -> None:
        if not answer.taken:
            self._refusing.add(worker)
            self.lost(worker)
            self._message(f"{self._who} reads a text in pieces otherwise than as a whole: it gets whole rollouts.")
            return
        if chunks:
            # Without a clock that runs meanwhile (runtime=local) there is no reason to hold back.
            rate = sum(chunk.length for chunk in chunks) / max(seconds, 1e-9)
            before = self._tokens_per_second.get(worker, rate)
            self._tokens_per_second[worker] = 0.5 * before + 0.5 * rate
        for chunk in chunks:
            self._read[chunk.rollout_id] = chunk.start + chunk.length
        for rollout_id in answer.evicted:
            self._read.pop(rollout_id, None)
        self._totals.evicted += len(answer.evicted)

    def answered(self, worker: Reader, infos: Sequence[RolloutInfo]) -> None:
        """The worker has forgotten these; those that another one owns are told to it when it is idle."""
        for info in infos:
            self._totals.scored += info.prompt_length + info.response_length
            self._totals.early += self.read_by(worker, info)
            if self.owns(worker, info):
                self._forget(info.rollout_id)

    def lost(self, worker: Reader) -> None:
        """Its caches are gone, and it may come back without them."""
        for rollout_id in [i for i, owner in self._owner.items() if owner is worker]:
            self._forget(rollout_id)
        self._waiting[worker].clear()

    def _forget(self, rollout_id: int) -> None:
        self._owner.pop(rollout_id, None)
        self._read.pop(rollout_id, None)
