"""The way from a generator to a score: collect loops, the reward queue, and how scoring is fused with generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from asyncrlhf.cluster.handles import RewardHandle
from asyncrlhf.errors import ReplicaError, RewardError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.chunking import Chunking
from asyncrlhf.orchestrator.service import Service, Waiting
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.orchestrator.token_service import TokenService
from asyncrlhf.types import RewardResult, RolloutInfo


class Scoring(Service[RewardHandle, RewardResult]):
    """``fusion.granularity`` says when a generated rollout may be scored: at once, with its group, with its batch.

    The services of the models (reference, critic) get each rollout at once, whatever the granularity, and chunks as
    this one does.
    """

    title = "reward worker"

    def __init__(
        self,
        state: RunState,
        assembly: Assembly,
        workers: list[RewardHandle],
        on_dead: Callable[[Replica, ReplicaError], None],
        first: TokenService[Any] | None = None,
    ) -> None:
        """``first``: of the models' services the one that each rollout goes to."""
        chunks = None
        if state.config.reward_reads_ahead:
            chunks = Chunking(
                "The reward model", state, workers, lambda group: group.rewarded, state.prefill, assembly.message
            )
        super().__init__(state, assembly, workers, chunks)
        self._on_dead = on_dead
        self._first = first
        self._held: list[Waiting] = []

    @property
    def queued(self) -> list[int]:
        """Rollout ids that wait for a reward worker, or for its answer."""
        return super().queued + [w.info.rollout_id for w in self._held]

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
                replica.end(failure.rollout_id, self._state.now(), finished=False)
                group_id = failure.rollout_id // self._state.config.num_generations
                self._assembly.failed(failure.rollout_id, group_id, failure.error, None)
            self.chunks_arrived(collected.chunks)
            if self._first is not None:
                self._first.chunks_arrived(collected.chunks)
            for info in collected.finished:
                replica.end(info.rollout_id, self._state.now(), finished=True)
                if self._assembly.generated(info):
                    self._take(Waiting(info, self._finished_at(info)))
            if collected.finished or collected.failed:
                self._promote()
                # A replica that is empty may be what a publish waits for.
                self._state.touch(replica, self._state.queue if replica.in_flight else self._state.changed)

    def _take(self, waiting: Waiting) -> None:
        self._held.append(waiting)
        if self._first is not None:
            self._first.arrived(waiting)

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
        if self._chunks is not None:
            self._chunks.promised([w.info for w in ready])

    async def score(self, worker: RewardHandle) -> None:
        """One reward worker: micro-batches of up to ``fusion.max_batch``, gathered for ``fusion.max_wait_ms``.

        Returns when the worker is lost and others are left; raises ReplicaError when it was the last one, and
        RewardError for the first rollout without a score where ``reward.on_failure`` is ``stop``.
        """
        await self.serve(worker)

    async def _call(self, worker: RewardHandle, batch: Sequence[Waiting]) -> list[RewardResult]:
        return await worker.score([w.info.payload for w in batch])

    def _mine(self, worker: RewardHandle) -> list[Waiting]:
        """Up to ``fusion.max_batch`` rollouts that this worker may score, oldest first."""
        able = (w for w in self._ready if self._may_take(worker, w))
        return list(islice(able, self._state.config.fusion.max_batch))

    def _full(self, worker: RewardHandle, batch: Sequence[Waiting]) -> bool:
        return len(batch) >= self._state.config.fusion.max_batch

    def _accept(self, waiting: Waiting, result: RewardResult) -> None:
        self._assembly.scored(waiting.info, waiting.at_version, result)
        if result.error is not None and self._state.config.reward.on_failure == "stop":
            raise RewardError(f"Rollout {result.rollout_id} got no reward (reward.on_failure=stop): {result.error}")

    def _failure(self, rollout_id: int, cause: str) -> RewardResult:
        return RewardResult(rollout_id, None, error=cause)
