"""The chunks of sequences that are still being sampled, and which worker reads each sequence ahead of its end.

A worker is asked to read ahead only while no finished rollout waits for it, and for a moment at a time, so that a
finished rollout waits for no more than that. Chunks may be lost or wrong without changing a score or a log-prob.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncrlhf.errors import ReplicaError
from asyncrlhf.types import Payload, RolloutInfo

CALL_SECONDS = 0.02  # of reading ahead per call, if a chunk is that short: limits the delay of finished rollouts
PATIENCE_SECONDS = 1.0  # after which another worker may take a rollout from the one with its cache


@dataclass(frozen=True)
class Chunk:
    """The tokens from place ``start`` on of a sequence [P+L], counted from the first of the prompt's P tokens; the
    sequence's first chunk holds the prompt.

    A chunk is a hint: a score never depends on which chunks came, how often, or in which order.
    """

    rollout_id: int
    start: int
    prompt_length: int
    token_ids: Sequence[int]  # [n], as a list: many small arrays cost more to send than their content


@dataclass(frozen=True)
class ChunkInfo:
    """What the controller knows of a chunk; its tokens stay behind ``payload``."""

    rollout_id: int
    start: int
    length: int
    payload: Payload


@dataclass(frozen=True)
class Prefilled:
    """A worker's result for chunks. ``taken`` is False if none of its models can read ahead; ``evicted`` are the
    rollouts whose cache was freed to make room; they are read again at their end."""

    taken: bool
    evicted: list[int] = field(default_factory=list)


class ReaderHandle(Protocol):
    """A worker that may read ahead."""

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        """Forget ``released``, read chunks of unfinished sequences. Raises ReplicaError if the worker dies in it."""
        ...


@dataclass
class ReadTotals:
    """Tokens of answered rollouts, those of them read before the rollout ended, and evictions to make room."""

    scored: int = 0
    early: int = 0
    evicted: int = 0


@dataclass(eq=False)
class ReadAhead:
    """Every unfinished sequence belongs to the worker that got its first chunk: the one with the fewest sequences.
    Without workers nothing is read ahead."""

    who: str  # reads, for sentences
    workers: Sequence[ReaderHandle]  # alive; the same list as the service's
    under_way: Callable[[int], bool]  # whether a rollout (by id) is being generated
    wanted: Callable[[int], bool]  # whether a rollout, ended or not, still waits for the workers' annotation
    totals: ReadTotals
    message: Callable[[str], None]  # shows the user a sentence
    wake: Callable[[], None]  # wakes the workers' loops
    _owner: dict[int, ReaderHandle] = field(default_factory=dict)  # by rollout id
    _waiting: dict[ReaderHandle, deque[ChunkInfo]] = field(default_factory=lambda: defaultdict(deque))
    _read: dict[int, int] = field(default_factory=dict)  # tokens that the owner holds, by rollout id
    _spoilt: set[int] = field(default_factory=set)  # they were in a call that ended with its worker's death
    _tokens_per_second: dict[ReaderHandle, float] = field(default_factory=dict)
    _refusing: set[ReaderHandle] = field(default_factory=set)

    def arrived(self, chunks: Sequence[ChunkInfo]) -> None:
        """Queue the chunks of one collection from a generator for their owners. Those of ended rollouts are skipped."""
        able = [worker for worker in self.workers if worker not in self._refusing]
        if not chunks or not able:
            return
        loads = Counter(self._owner.values())
        for chunk in chunks:
            rollout_id = chunk.rollout_id
            if not self.under_way(rollout_id) or rollout_id in self._spoilt:
                continue
            if rollout_id not in self._owner and chunk.start == 0:
                self._owner[rollout_id] = min(able, key=loads.__getitem__)
                loads[self._owner[rollout_id]] += 1
            if rollout_id in self._owner:  # else its worker was lost, and another would miss the earlier chunks
                self._waiting[self._owner[rollout_id]].append(chunk)
        # A worker that is never idle reads no chunks, and they would keep their tokens alive.
        for waiting in self._waiting.values():
            while waiting and not self.under_way(waiting[0].rollout_id):
                waiting.popleft()
        self.wake()

    def may_take(self, worker: ReaderHandle, info: RolloutInfo) -> bool:
        """Its owner may; any worker if it has no owner, or ``PATIENCE_SECONDS`` after it was generated."""
        owner = self._owner.get(info.rollout_id)
        return owner is None or owner is worker or _now() - info.generated_at >= PATIENCE_SECONDS

    def owns(self, worker: ReaderHandle, info: RolloutInfo) -> bool:
        return self._owner.get(info.rollout_id) is worker

    def read_by(self, worker: ReaderHandle, info: RolloutInfo) -> int:
        """Tokens of the rollout that ``worker`` has already read."""
        return self._read.get(info.rollout_id, 0) if self.owns(worker, info) else 0

    def promised(self, infos: Sequence[RolloutInfo]) -> None:
        """These rollouts have ended: after ``PATIENCE_SECONDS``, when any worker may take them, wake the loops."""
        if len(self.workers) > 1 and any(info.rollout_id in self._owner for info in infos):
            # Slightly later: a difference of clock times may be a rounding error too short.
            asyncio.get_running_loop().call_later(1.001 * PATIENCE_SECONDS, self.wake)

    def has_work(self, worker: ReaderHandle) -> bool:
        return bool(self._waiting.get(worker))

    async def read(self, worker: ReaderHandle) -> None:
        """Send an idle worker one call of chunks to read. Raises ReplicaError when the worker died during the call."""
        chunks = self._next(worker)
        if not chunks:
            return
        # Cancelled, failed, dropped, or answered by another worker.
        released = [i for i, owner in self._owner.items() if owner is worker and not self.wanted(i)]
        for rollout_id in released:
            self._forget(rollout_id)
        started = _now()
        try:
            answer = await worker.prefill(released, chunks)
        except ReplicaError:
            suspects = self._spoilt | {chunk.rollout_id for chunk in chunks}
            self._spoilt = {rollout_id for rollout_id in suspects if self.wanted(rollout_id)}
            raise
        self._file(worker, chunks, answer, _now() - started)

    def _next(self, worker: ReaderHandle) -> list[ChunkInfo]:
        """The oldest waiting chunks, about ``CALL_SECONDS`` of work for ``worker``, and at least one."""
        waiting = self._waiting[worker]
        budget = CALL_SECONDS * self._tokens_per_second.get(worker, 0.0)
        chunks: list[ChunkInfo] = []
        tokens = 0
        while waiting and (not chunks or tokens + waiting[0].length <= budget):
            chunk = waiting.popleft()
            if self.under_way(chunk.rollout_id):  # else the finished rollout is in the queue, with all of its tokens
                chunks.append(chunk)
                tokens += chunk.length
        return chunks

    def _file(self, worker: ReaderHandle, chunks: list[ChunkInfo], answer: Prefilled, seconds: float) -> None:
        if not answer.taken:
            self._refusing.add(worker)
            self.lost(worker)
            self.message(
                f"{self.who} scores a text read in chunks differently from the whole text: it now gets whole rollouts."
            )
            return
        # With the virtual clock (runtime=local) the time per call need not be limited.
        rate = sum(chunk.length for chunk in chunks) / max(seconds, 1e-9)
        self._tokens_per_second[worker] = 0.5 * rate + 0.5 * self._tokens_per_second.get(worker, rate)
        for chunk in chunks:
            self._read[chunk.rollout_id] = chunk.start + chunk.length
        for rollout_id in answer.evicted:
            self._read.pop(rollout_id, None)
        self.totals.evicted += len(answer.evicted)

    def answered(self, worker: ReaderHandle, infos: Sequence[RolloutInfo]) -> None:
        """Count the tokens of rollouts that ``worker`` answered. It has released their caches; another owner is told to
        release them when it is idle."""
        for info in infos:
            self.totals.scored += info.tokens
            self.totals.early += self.read_by(worker, info)
            if self.owns(worker, info):
                self._forget(info.rollout_id)

    def lost(self, worker: ReaderHandle) -> None:
        """Forget what ``worker`` owned and had queued: the worker lost its caches, and may return without them."""
        for rollout_id in [i for i, owner in self._owner.items() if owner is worker]:
            self._forget(rollout_id)
        self._waiting[worker].clear()

    def _forget(self, rollout_id: int) -> None:
        self._owner.pop(rollout_id, None)
        self._read.pop(rollout_id, None)


def _now() -> float:
    """Seconds of the run's clock."""
    return asyncio.get_running_loop().time()
