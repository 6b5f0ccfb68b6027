"""The learner's loop: wait for a batch, train, publish, record, and drop rollouts that became too old."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.buffer.ledger import LedgerEntry
from asyncrlhf.cluster.handles import LONG_SECONDS, Runtime
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.learning.bookkeeping import Bookkeeping
from asyncrlhf.orchestrator.learning.lead import Lead
from asyncrlhf.orchestrator.learning.meters import Meters
from asyncrlhf.orchestrator.learning.normalize import RewardNormalizer
from asyncrlhf.orchestrator.learning.signs import MissingSign
from asyncrlhf.orchestrator.recording.rollout_log import RolloutLog
from asyncrlhf.orchestrator.replicas.turns import Turns
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.types import DropReason, RolloutGroup, RolloutInfo


@dataclass(eq=False)
class LearnLoop:
    """Runs until ``config.steps`` or until ``state.stopping``; no other loop writes ``state.version``."""

    state: RunState
    runtime: Runtime
    assembly: Assembly
    publisher: WeightPublisher
    log: RolloutLog
    bookkeeping: Bookkeeping
    turns: Turns
    normalizer: RewardNormalizer
    training: bool = False
    taken: Sequence[RolloutGroup] = ()  # the batch of the step under way
    # Groups that had their last use since the newest checkpoint and no token since then, with their entries in the
    # ledger: a learner that dies gives them back. While a checkpoint is being written it may become the newest or not,
    # so both count. They all began before a checkpoint, so the buffer's capacity bounds their number.
    ended: list[tuple[RolloutGroup, list[LedgerEntry]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.since = self.state.now()  # the learner has been at its step, or has waited for its batch
        self._unlogged: dict[str, Any] | None = None
        self._meters = Meters(self.state, self.publisher)
        self._lead = Lead(self.state)
        self.log.begin()
        self._signs = MissingSign(self.state.config.algorithm)
        self._publish_due = False
        self._purged_for = -1
        self._training: asyncio.Task[Any] | None = None
        self._telling: set[asyncio.Task[Any]] = set()  # replicas to forget what was dropped

    async def run(self) -> None:
        while self.state.version < self.state.config.steps:
            started = self.since = self.state.now()
            self._lead.asked()
            taken = await self._next_batch()
            if taken is None:
                break
            await self._step(taken, self.state.now() - started)
        await self._catch_up()

    async def forget(self) -> None:
        """The learner is lost and the run will go back to a checkpoint: cancel the step under way."""
        if self._training is not None:
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)
        self._training = self._unlogged = None
        self.training = self._publish_due = False
        self._purged_for = -1

    async def settle(self) -> None:
        """After the last step: wait until the generators hold the final weights."""
        await self.publisher.idle()
        if self._publish_due:
            self._publish()
            await self.publisher.idle()

    async def _next_batch(self) -> list[RolloutGroup] | None:
        """The next batch, or None if the run is stopping. Makes a delayed publish, without which no rollout is
        admitted."""
        state, buffer = self.state, self.state.buffer
        while True:
            await state.batch.wait_for(self._has_work)
            self.publisher.raise_if_failed()
            if state.stopping:
                return None
            if self._purge_is_due():
                self._purged_for = state.published_version
                self.assembly.drop_begun_before(state.published_version)
                state.changed.notify()
            elif (taken := buffer.take(state.version, state.groups.versions)) is not None:
                state.room.notify()
                return taken
            elif self._may_publish():
                self._publish()

    def _has_work(self) -> bool:
        """Whether to stop waiting: for a batch, or for a stop, failure, purge or publish that comes before it."""
        state = self.state
        if state.stopping or self.publisher.failure is not None or self._purge_is_due() or self._may_publish():
            return True
        return state.buffer.ready(state.version, state.groups.versions)

    def _purge_is_due(self) -> bool:
        """Whether a publish asks for a purge of the buffer, which comes before the next batch."""
        return self.state.config.algorithm.purge_on_publish and self.state.published_version > self._purged_for

    def _may_publish(self) -> bool:
        newer = self.state.version > self.state.published_version  # a checkpoint may have published already
        return self._publish_due and newer and not self.publisher.busy

    async def _step(self, taken: list[RolloutGroup], waited: float) -> None:
        state, version = self.state, self.state.version
        state.buffer.check_batch(version, taken)
        rollouts = [r for group in taken for r in group.rollouts]
        if not rollouts:
            raise AsyncRLHFError(f"Every rollout of the batch for step {version} failed: there is nothing to train on.")
        self.taken = taken
        normal, reward_metrics = self.normalizer.of_batch(rollouts)
        started = self.since = state.now()
        self.training = True
        self._training = asyncio.create_task(self._train(normal), name="train")
        await self._catch_up()
        result, begun, trained = await self._training
        result = replace(result, metrics={**result.metrics, **reward_metrics})
        self.training = False
        self._file(taken, version)
        self.taken = ()
        self.log.used(taken, version)
        state.version = version + 1
        state.journal.note("step", step=state.version)
        self._drop_late()
        await self._publish_if_due()
        metrics = self._meters.step(version, taken, result, waited + begun - started, trained) | self._lead.figures
        self._adapt(result.metrics)
        state.progressed()
        self._unlogged = metrics
        if self.bookkeeping.is_boundary(state.version):
            await self._catch_up()

    async def _train(self, rollouts: Sequence[RolloutInfo]) -> tuple[StepResult, float, float]:
        """Train one step in the learner's turn; also returns when the turn began, and the seconds of the step."""
        due = self._due(self.state.version + 1)
        async with self.turns.learner(publishes=due):
            begun = self.state.now()
            result = await self.runtime.learner.train(rollouts)
            seconds = self.state.now() - begun
            if due:
                await self.publisher.prepare()
            return result, begun, seconds

    def _adapt(self, metrics: Mapping[str, float]) -> None:
        """Adapt the staleness bound of the next batches; groups over a smaller bound are handled as
        ``async.over_stale`` says. Also warns if the algorithm never meets a negative advantage."""
        warning = self._signs.observe(metrics)
        if warning is not None:
            self.state.message(warning)
        change = self.state.adaptive.observe(metrics)
        if change is not None:
            self.state.message(change)
            self.state.journal.note("bound", bound=self.state.bound)
            self._drop_late()

    async def _catch_up(self) -> None:
        """Record the previous step; the learner trains the next one meanwhile, unless that must wait
        (``is_boundary``)."""
        metrics, self._unlogged = self._unlogged, None
        if metrics is not None:
            await self.log.hand_over()
            rests = self.state.rests
            await self.bookkeeping.after_step(metrics)
            if self.state.rests > rests:
                self._lead = Lead(self.state)  # a resumed run knows of no needs either

    async def _publish_if_due(self) -> None:
        """Publish the new version if it is due. The scheduled modes publish every version and wait for the previous
        publish; a free run delays this publish instead of waiting."""
        state = self.state
        if not self._due(state.version):
            return
        if state.scheduled:
            await self.publisher.idle()
        self._publish_due = self.publisher.busy
        if not self._publish_due:
            self._publish()

    def _due(self, version: int) -> bool:
        """Whether ``version`` is one of those that are published."""
        return version % self.state.config.weights.publish_every == 0 or version == self.state.config.steps

    def _publish(self) -> None:
        self._publish_due = False
        self.publisher.publish(self.state.version)

    def _file(self, taken: list[RolloutGroup], version: int) -> None:
        state = self.state
        self.ended = [(g, entries) for g, entries in self.ended if entries[0].trained_at[-1] >= state.saved_version]
        for group in taken:
            entries = [entry for info in group.rollouts if (entry := state.ledger.get(info.rollout_id)) is not None]
            for info in group.rollouts:
                state.ledger.train(info.rollout_id, version, last_use=group.uses_left == 0)
            if not (group.uses_left or state.scheduled) and group.max_version <= state.taken_version:
                self.ended.append((group, entries))

    def _drop_late(self) -> None:
        """Drop the groups, in the buffer and in flight, that could only be consumed over the bound."""
        self._forget(self.assembly.drop_late())

    def call_off(self, group_ids: Sequence[int], reason: DropReason) -> None:
        """Drop unfinished groups and tell the replicas to cancel their rollouts."""
        self._forget(self.assembly.cancel(group_ids, reason))

    def _forget(self, ids: Collection[int]) -> None:
        state = self.state
        state.episodes.call_off(ids)
        for replica in state.replicas if ids else ():
            mine = sorted(replica.in_flight.intersection(ids))
            if mine:
                for rollout_id in mine:
                    replica.end(rollout_id, state.now(), finished=False)
                told = replica.handle.call(LONG_SECONDS, GeneratorWorker.cancel, mine)
                task = asyncio.create_task(state.heard(replica, told))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)
