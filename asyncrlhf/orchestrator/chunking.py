"""The way of chunks (``fusion.granularity=chunk``): which reward worker reads which sequence ahead of its end.

A worker is asked to read ahead only while it has nothing to score, and for a moment at a time, so that a finished
rollout waits for no more than that. All of this may be lost or wrong without changing a score.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.handles import RewardHandle
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.rewards.chunked_messages import ChunkInfo, Prefilled
from asyncrlhf.types import RolloutInfo

SWEEP_SECONDS = 1.0
CALL_SECONDS = 0.02  # of reading ahead in one call, as far as a chunk can be so short: what a finished rollout may wait
PATIENCE_SECONDS = 1.0  # after which another worker scores what waits for the one with its cache


class Chunking:
    """Every sequence under way belongs to the worker that got its first chunk, the one with fewest of them."""

    def __init__(self, state: RunState, workers: Sequence[RewardHandle], message: Callable[[str], None]) -> None:
        self._state = state
        self._message = message
        self._workers = workers  # alive; the same list as the scoring loops'
        self._owner: dict[int, RewardHandle] = {}  # by rollout id
        self._waiting: dict[RewardHandle, deque[ChunkInfo]] = {worker: deque() for worker in workers}
        self._read: dict[int, int] = {}  # tokens that the owner holds, by rollout id
        self._spoilt: set[int] = set()  # they were in a call that ended with its worker's death
        self._tokens_per_second: dict[RewardHandle, float] = {}
        self._refusing: set[RewardHandle] = set()
        self._swept: dict[RewardHandle, float] = {}

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
        self._state.changed.notify()

    def _is_under_way(self, rollout_id: int) -> bool:
        group = self._state.groups.get(rollout_id // self._state.config.num_generations)
        return group is not None and rollout_id in group.unfinished

    def _is_wanted(self, rollout_id: int) -> bool:
        group = self._state.groups.get(rollout_id // self._state.config.num_generations)
        return group is not None and rollout_id in group.unscored

    def may_score(self, worker: RewardHandle, info: RolloutInfo) -> bool:
        """Its owner, anybody where it has none, and anybody after a while."""
        owner = self._owner.get(info.rollout_id)
        return owner is None or owner is worker or self._state.now() - info.generated_at >= PATIENCE_SECONDS

    def promised(self, rollouts: int) -> None:
        """So many rollouts are to be scored: look again when patience with their owners is over."""
        if rollouts and self._owner and len(self._workers) > 1:
            asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._state.changed.notify)

    def has_work(self, worker: RewardHandle) -> bool:
        """Chunks at once; what is to be forgotten is looked for now and then, for that takes a look at everything."""
        if self._waiting.get(worker):
            return True
        now = self._state.now()
        if worker in self._refusing or now - self._swept.get(worker, -math.inf) < SWEEP_SECONDS:
            return False
        self._swept[worker] = now
        return bool(self._unwanted(worker))

    def _unwanted(self, worker: RewardHandle) -> list[int]:
        """Rollouts of this worker that were cancelled, failed, dropped, or scored by another."""
        return [i for i, owner in self._owner.items() if owner is worker and not self._is_wanted(i)]

    async def read(self, worker: RewardHandle) -> None:
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

    def _next(self, worker: RewardHandle) -> list[ChunkInfo]:
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

    def _file(self, worker: RewardHandle, chunks: list[ChunkInfo], answer: Prefilled, seconds: float) -> None:
        if not answer.taken:
            self._refusing.add(worker)
            self.lost(worker)
            self._message("The reward model scores a text in pieces otherwise than as a whole: it gets whole rollouts.")
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
        self._state.prefill.evicted += len(answer.evicted)

    def scored(self, worker: RewardHandle, infos: Sequence[RolloutInfo]) -> None:
        """The worker has forgotten these; those that another one owns are told to it when it is idle."""
        for info in infos:
            owned = self._owner.get(info.rollout_id) is worker
            self._state.prefill.scored += info.prompt_length + info.response_length
            self._state.prefill.early += self._read.get(info.rollout_id, 0) if owned else 0
            if owned:
                self._forget(info.rollout_id)

    def lost(self, worker: RewardHandle) -> None:
        """Its caches are gone, and it may come back without them."""
        for rollout_id in [i for i, owner in self._owner.items() if owner is worker]:
            self._forget(rollout_id)
        self._waiting[worker].clear()

    def _forget(self, rollout_id: int) -> None:
        self._owner.pop(rollout_id, None)
        self._read.pop(rollout_id, None)
