"""The learner's death: its group is started again, and the run goes back to the newest checkpoint; generators stay up.

A checkpoint and not the snapshot that is being published: a snapshot lacks the optimizer's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import LONG_SECONDS, Runtime
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import LearnerLostError, ReplicaError
from asyncrlhf.orchestrator.critics import CriticVersions
from asyncrlhf.orchestrator.learn import LearnLoop
from asyncrlhf.orchestrator.normalize import RewardNormalizer
from asyncrlhf.orchestrator.resume import completed, restore, snapshot_state
from asyncrlhf.orchestrator.rollout_log import RolloutLog
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.orchestrator.turns import Turns
from asyncrlhf.orchestrator.weight_sync import WeightPublisher
from asyncrlhf.records.checkpoint import Saved, list_checkpoints, read_checkpoint
from asyncrlhf.records.recorder import RecordMarker

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a start; each is twice as long as the one before


def beginning(state: RunState, source: PromptSource, log: RolloutLog) -> Saved:
    """What a fresh run goes back to before its first checkpoint: nothing admitted, the initial model."""
    document, _ = snapshot_state(state, source, log)
    return Saved(Path(), document, {}, RecordMarker(journal=state.journal.mark()))


@dataclass(eq=False)
class Rollback:
    """``begun``: what the run began with, ``beginning`` or the checkpoint that it was resumed from."""

    state: RunState
    runtime: Runtime
    source: PromptSource
    publisher: WeightPublisher
    critics: CriticVersions
    turns: Turns
    normalizer: RewardNormalizer
    log: RolloutLog
    learn: LearnLoop
    run_dir: Path
    begun: Saved
    _deaths: list[tuple[int, ReplicaError]] = field(default_factory=list)  # at which version, since it got no further

    async def recover(self, error: ReplicaError) -> None:
        """Bring the learner back after it died of ``error``, and the run with it. Raises ReplicaError with the first
        cause when it died ``learner.max_restarts`` times before without getting any further."""
        while True:
            await self.learn.forget()
            await self.publisher.forget()
            self.critics.forget()
            self._count(error)
            try:
                await self._patiently(self._restart())
                await self._go_back()
                return
            except ReplicaError as again:
                error = again

    def _count(self, error: ReplicaError) -> None:
        state, most = self.state, self.state.config.learner.max_restarts
        if any(state.version > version for version, _ in self._deaths) and isinstance(error, LearnerLostError):
            self._deaths.clear()
        self._deaths.append((state.version, error))
        if len(self._deaths) <= most:
            state.message(f"{error} The learner starts again ({len(self._deaths)} of {most} times).")
            return
        raise ReplicaError(
            f"{self._deaths[0][1]} The learner died {len(self._deaths)} times at step {state.version} without getting "
            f"any further (learner.max_restarts={most})."
        ) from self._deaths[0][1]

    async def _restart(self) -> None:
        await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (len(self._deaths) - 1)))
        await self.runtime.restart_learner()

    async def _patiently(self, work: Coroutine[Any, Any, None]) -> None:
        """A start is bounded by ``cluster.start_timeout_seconds`` and is no stall."""
        task = asyncio.create_task(work, name="restart of the learner")
        try:
            while not (await asyncio.wait([task], timeout=self.state.config.stall_timeout_seconds / 10))[0]:
                self.state.progressed()
            task.result()
        finally:
            task.cancel()

    async def _go_back(self) -> None:
        """From version v to c, that of the newest checkpoint: a fresh learner holds its weights, every generator loads
        them before it is given work, and what belongs to a version over c is undone."""
        state = self.state
        saved = await off_loop(self._newest)
        self.normalizer.forget()
        if saved.rollouts or saved.folder != Path():
            await self.runtime.learner.load(saved.learner)
            self.normalizer.load(saved.learner)
        saved = await completed(saved, state.config, self.runtime)
        undone, elapsed = state.version, state.elapsed
        await self._stop_generators()
        await self.log.rewind(saved.marker)
        state.journal.note("undone", line=saved.marker.journal)
        state.journal.begin(saved.step, state.config)
        state.journal.note("rollback", epoch=state.epoch, version=undone, to=saved.step)
        restore(state, saved, self.source, self.log, self.runtime)
        state.elapsed = elapsed  # time does not go back
        state.message(f"The learner is back: from step {undone} to the checkpoint of step {state.version}.")
        await self.turns.wake()
        self.publisher.publish(state.version)
        self.publisher.found()
        await self.publisher.idle()
        state.progressed()

    def _newest(self) -> Saved:
        found = list_checkpoints(self.run_dir)
        return read_checkpoint(found[-1]) if found else self.begun

    async def _stop_generators(self) -> None:
        """Nothing that a generator has in hand is waited for any more, and it gets no work before it holds weights of
        the new epoch."""
        state, now = self.state, self.state.now()
        state.epoch += 1
        state.published_version = -1
        for replica in state.replicas:
            replica.version = -1
        await asyncio.sleep(0)  # what was handed out just now is on its way: a cancellation must come behind it
        telling = []
        for replica in (r for r in state.replicas if r.alive):
            held = sorted(replica.in_flight)
            for rollout_id in held:
                replica.end(rollout_id, now, finished=False)
            telling.append(state.heard(replica, replica.handle.call(LONG_SECONDS, GeneratorWorker.cancel, held)))
        await asyncio.gather(*telling)
