"""What follows a learner step: its records, the held-out evaluation, the checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.orchestrator.evaluation import HeldOut
from asyncrlhf.orchestrator.normalize import RewardNormalizer
from asyncrlhf.orchestrator.replicas import Replicas
from asyncrlhf.orchestrator.resume import snapshot_state
from asyncrlhf.orchestrator.rollout_log import RolloutLog
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.orchestrator.weight_sync import WeightPublisher
from asyncrlhf.records.checkpoint import CheckpointWriter
from asyncrlhf.records.progress import RunView
from asyncrlhf.records.recorder import RunRecorder


class Bookkeeping:
    """``accuracies``: the held-out accuracies so far, oldest first."""

    def __init__(
        self,
        state: RunState,
        runtime: Runtime,
        source: PromptSource,
        heldout: HeldOut,
        replicas: Replicas,
        publisher: WeightPublisher,
        normalizer: RewardNormalizer,
        log: RolloutLog,
        recorder: RunRecorder,
        view: RunView,
    ) -> None:
        self.accuracies: list[float] = []
        self._state = state
        self._runtime = runtime
        self._source = source
        self._heldout = heldout
        self._replicas = replicas
        self._publisher = publisher
        self._normalizer = normalizer
        self._log = log
        self._recorder = recorder
        self._view = view

    def is_boundary(self, step: int) -> bool:
        """Whether the step after ``step`` must wait for this one's evaluation or checkpoint, which read its weights."""
        return self._evaluates(step) or self._saves(step) or step == self._state.config.steps

    def _evaluates(self, step: int) -> bool:
        return self._falls_on(step, self._state.config.eval_every)

    def _saves(self, step: int) -> bool:
        return self._falls_on(step, self._state.config.checkpoint.every)

    def _falls_on(self, step: int, every: int) -> bool:
        """The last step is evaluated and saved where the run ends."""
        return every > 0 and step % every == 0 and step < self._state.config.steps

    async def after_step(self, metrics: dict[str, Any]) -> None:
        """Record a step; evaluate and write a checkpoint where one is due."""
        step = int(metrics["step"])
        if self._evaluates(step):
            metrics["heldout_accuracy"] = await self.evaluate()
        await off_loop(partial(self._recorder.log_step, metrics))
        await off_loop(partial(self._view.step, metrics))
        self._state.ledger.check()
        if self._saves(step):
            await self.save()

    async def evaluate(self) -> float | None:
        """Held-out accuracy of the weights that the replicas hold; None where it cannot be measured."""
        # A share for a replica that is held back would have the run wait for it alone.
        brisk = [r for r in self._state.replicas if r.alive and not r.pace.held_back]
        asked = brisk or self._state.replicas
        accuracy = await self._heldout.accuracy(asked, self._runtime.rewards, self._replicas.died)
        if accuracy is not None:
            self.accuracies.append(accuracy)
            self._view.message(f"Held-out greedy accuracy at version {self._state.version}: {accuracy:.3f}")
        return accuracy

    async def save(self) -> None:
        """Write a checkpoint of this step. A scheduled mode first lets its schedule come to rest, so that a resumed run
        has the same batches, from the same versions, as an uninterrupted one."""
        state = self._state
        if state.scheduled:
            await self._publisher.idle()
            await state.changed.wait_for(lambda: not state.groups and state.gate.room(state.version) == 0)
        folder, keep = Path(self._recorder.run_dir), state.config.checkpoint.keep
        writer = await off_loop(partial(CheckpointWriter, folder, state.version, keep))
        await self._runtime.learner.save(writer.learner)
        await off_loop(partial(self._normalizer.save, writer.learner))
        # No await between these two: what the document counts as ended is what the records hold.
        document, payloads = snapshot_state(state, self._source, self._log)
        marker = self._log.mark()
        await self._log.flush()
        rollouts = await self._runtime.fetch(payloads)
        await off_loop(partial(writer.commit, document, {r.rollout_id: r for r in rollouts}, marker))
        state.progressed()
