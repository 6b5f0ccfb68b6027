"""The way from a generator to a score: collect loops, the reward queue, and how scoring is fused with generation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.handles import RewardHandle
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.types import RolloutInfo


@dataclass(frozen=True)
class Waiting:
    """A generated rollout in the reward queue, and the learner's version when it arrived there."""

    info: RolloutInfo
    at_version: int


class Scoring:
    """``fusion.granularity`` says when a generated rollout may be scored: at once, with its group, with its batch."""

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
        self._ready: deque[Waiting] = deque()
        self._held: list[Waiting] = []

    @property
    def queued(self) -> list[int]:
        """Rollout ids that wait for a reward worker."""
        return [w.info.rollout_id for w in self._ready] + [w.info.rollout_id for w in self._held]

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
        if granularity == "rollout":
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

    async def score(self, worker: RewardHandle) -> None:
        """One reward worker: micro-batches of up to ``fusion.max_batch``, gathered for ``fusion.max_wait_ms``."""
        fusion = self._state.config.fusion
        while True:
            await self._state.changed.wait_for(lambda: self._ready)
            more_to_come = any(r.in_flight for r in self._state.replicas)
            if len(self._ready) < fusion.max_batch and fusion.max_wait_ms > 0 and more_to_come:
                await asyncio.sleep(fusion.max_wait_ms / 1000)
            count = min(len(self._ready), fusion.max_batch)
            batch = [self._ready.popleft() for _ in range(count)]
            if not batch:
                continue
            results = {r.rollout_id: r for r in await worker.score([w.info.payload for w in batch])}
            for waiting in batch:
                self._assembly.scored(waiting.info, waiting.at_version, results[waiting.info.rollout_id])
            self._state.progressed()
