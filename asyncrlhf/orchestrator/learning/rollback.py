"""The learner's death: its group is started again, and the run goes back to the newest checkpoint; generators stay up.

It goes back to a checkpoint and not to the snapshot being published, because a snapshot lacks the optimizer's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.buffer.admission import StalenessGate
from asyncrlhf.buffer.ledger import LedgerEntry
from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import LONG_SECONDS, Runtime
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import LearnerLostError, ReplicaError
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.learning.normalize import RewardNormalizer
from asyncrlhf.orchestrator.recording.resume import completed, restore, snapshot_state
from asyncrlhf.orchestrator.recording.rollout_log import RolloutLog
from asyncrlhf.orchestrator.replicas.turns import Turns
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.rollouts.critics import CriticVersions
from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.records.write.checkpoint import Saved, list_checkpoints, newest_whole, read_checkpoint
from asyncrlhf.records.write.record_marker import RecordMarker
from asyncrlhf.types import RolloutGroup

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a start; each is twice as long as the one before


def beginning(state: RunState, source: PromptSource, log: RolloutLog) -> Saved:
    """The state to go back to before the first checkpoint: no rollout admitted, the initial model."""
    document, _ = snapshot_state(state, source, log)
    return Saved(Path(), document, {}, RecordMarker(journal=state.journal.mark()))


@dataclass(eq=False)
class Rollback:
    """``begun``: the state that the run began with, from ``beginning`` or from the checkpoint that it resumed."""

    state: RunState
    runtime: Runtime
    source: PromptSource
    publisher: WeightPublisher
    critics: CriticVersions
    turns: Turns
    normalizer: RewardNormalizer
    log: RolloutLog
    learn: LearnLoop
    assembly: Assembly
    run_dir: Path
    begun: Saved
    _deaths: list[tuple[int, ReplicaError]] = field(default_factory=list)  # at the same version, without progress

    async def recover(self, error: ReplicaError) -> None:
        """Restart the learner after ``error`` and take the run back. Raises ReplicaError with the first cause if the
        learner had already died ``max_restarts`` times without training any further step."""
        while True:
            await self.learn.forget()
            await self.learn.bookkeeping.give_up_writing()
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
        state, most = self.state, self.state.config.max_restarts
        if not most:
            raise error
        if all(state.version > version for version, _ in self._deaths) and isinstance(error, LearnerLostError):
            self._deaths.clear()
        self._deaths.append((state.version, error))
        if len(self._deaths) <= most:
            state.message(f"{error} The learner starts again ({len(self._deaths)} of {most} times).")
            return
        raise ReplicaError(
            f"{self._deaths[0][1]} The learner died {len(self._deaths)} times at step {state.version} without getting "
            f"any further (max_restarts={most})."
        ) from self._deaths[0][1]

    async def _restart(self) -> None:
        await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (len(self._deaths) - 1)))
        await self.turns.free()
        await self.runtime.restart_learner()

    async def _patiently(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a learner's start without counting it as a stall; ``cluster.start_timeout_seconds`` limits it."""
        task = asyncio.create_task(work, name="restart of the learner")
        try:
            while not (await asyncio.wait([task], timeout=self.state.config.stall_timeout_seconds / 10))[0]:
                self.state.progressed()
            task.result()
        finally:
            task.cancel()

    async def _go_back(self) -> None:
        """Go back from version v to the newest checkpoint's version c: a fresh learner loads its weights, every
        generator loads them before it is given work, and all that depends on a version over c is undone."""
        state = self.state
        saved = await off_loop(self._newest)
        self.normalizer.forget()
        if saved.folder != Path():
            await self.runtime.learner.load(saved.learner)
            self.normalizer.load(saved.learner)
        died_at = state.version
        state.epoch += 1
        state.published_version = -1
        for replica in state.replicas:
            replica.version = -1
        await asyncio.sleep(0)  # work just submitted is in transit: a cancellation must arrive after it
        await (self._restore if state.scheduled else self._undo)(saved)
        self.learn.taken, self.learn.ended = (), []
        state.message(f"The learner is back: from step {died_at} to the checkpoint of step {state.version}.")
        await self.publisher.prepare()
        await self.turns.wake()
        self.publisher.publish(state.version)
        self.publisher.found()
        await self.publisher.idle()
        state.progressed()

    async def _undo(self, saved: Saved) -> None:
        """In a free run: rollouts without a token of a version over the checkpoint's stay, in flight and in the buffer,
        and return to it if they were trained since; all others are dropped. The order of prompts does not go back."""
        state, to = self.state, saved.step
        state.adaptive.load_state_dict(saved.state["adaptive"])
        self.learn.call_off([g.group_id for g in state.groups.values() if self._sampled_beyond(g, to)], "rolled_back")
        held = {group.group_id: group for group in state.buffer.groups()}
        taken = [group for group in self.learn.taken if group.group_id not in held]
        undone = [group for group in (*taken, *held.values()) if group.max_version > to]
        state.buffer.discard({group.group_id for group in undone} & held.keys())
        back, room = list[RolloutGroup](), state.buffer.free
        for group in taken:
            if group.max_version <= to:
                room -= len(group)
                (back if room >= 0 else undone).append(group)
        before, returned = list[RolloutGroup](), list[LedgerEntry]()
        for group, entries in self.learn.ended:
            if entries[0].trained_at[-1] >= to >= group.max_version and len(group) <= room:
                room -= len(group)
                before.append(group)
                returned += entries
        back = before + back  # as they were trained: another order would keep the oldest waiting beyond the bound
        self.assembly.drop(undone, "rolled_back")
        ids = [entry.rollout_id for entry in returned]
        if ids:
            state.journal.note("returned", ids=ids)
        self._note(to)
        state.ledger.undo_training(to, returned)
        replayed = saved.state["buffer"]["replayed"]
        uses = self.log.uses_before(to, {entry.rollout_id: entry.trained_at for entry in returned})
        state.buffer.rewind(to, replayed, back, uses)
        if isinstance(state.gate, StalenessGate):
            owed = len(state.groups) * state.config.buffer.places + state.buffer.owed()
            state.gate.rewind(to * state.config.batch_size // state.config.num_generations - replayed, owed)
        state.version = state.saved_version = state.taken_version = to
        state.journal.note("bound", bound=state.bound)
        state.follow()
        state.ledger.check()
        await self.log.undo_training(saved.marker, to, set(ids))

    def _sampled_beyond(self, group: GroupInProgress, version: int) -> bool:
        """Whether any token of the group may be of a version after ``version``."""
        if max(group.version, group.newest) > version:
            return True
        return any(group.unfinished & r.in_flight for r in self.state.replicas if r.asked > version)

    async def _restore(self, saved: Saved) -> None:
        """In a scheduled run: restore the checkpoint's state exactly and issue again the rollouts that were in flight
        then. Anything else would change the schedule."""
        state, elapsed = self.state, self.state.elapsed
        saved = await completed(saved, state.config, self.runtime, state.progressed)
        telling = []
        for replica in (r for r in state.replicas if r.alive):
            held = sorted(replica.in_flight)
            for rollout_id in held:
                replica.end(rollout_id, state.now(), finished=False)
            telling.append(state.heard(replica, replica.handle.call(LONG_SECONDS, GeneratorWorker.cancel, held)))
        await asyncio.gather(*telling)
        await self.log.rewind(saved.marker)
        state.journal.note("undone", line=saved.marker.journal)
        self._note(saved.step)
        # At the last moment: the dispatcher begins episodes also while no replica can sample.
        state.episodes.call_off([i for i in state.episodes.at if i >= 0])
        restore(state, saved, self.source, self.log, self.runtime)
        state.elapsed = elapsed  # time does not go back

    def _note(self, to: int) -> None:
        self.state.journal.note("rollback", epoch=self.state.epoch, version=self.state.version, to=to)

    def _newest(self) -> Saved:
        saved, passed_over = newest_whole(list_checkpoints(self.run_dir)[::-1], read_checkpoint)
        for sentence in passed_over:
            self.state.message(sentence)
        return saved or self.begun
