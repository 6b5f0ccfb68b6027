"""The work after a learner step: its records, the checkpoint, and the held-out evaluation on the generators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import CheckpointError
from asyncrlhf.orchestrator.learning.normalize import RewardNormalizer
from asyncrlhf.orchestrator.recording.resume import snapshot_state
from asyncrlhf.orchestrator.recording.rollout_log import RolloutLog
from asyncrlhf.orchestrator.replicas.turns import Turns
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut, Measured
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.records.show.progress import RunView
from asyncrlhf.records.write.checkpoint import CheckpointWriter
from asyncrlhf.records.write.record_marker import RecordMarker
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.records.write.rollout_rows import write_answers
from asyncrlhf.types import Payload

WRITE_OUT_SECONDS = 10.0  # for a checkpoint that is being written when the run fails


@dataclass(eq=False)
class Bookkeeping:
    """``measured``: the metrics of the held-out evaluations so far, oldest first."""

    state: RunState
    runtime: Runtime
    source: PromptSource
    heldout: HeldOut
    publisher: WeightPublisher
    turns: Turns
    normalizer: RewardNormalizer
    log: RolloutLog
    recorder: RunRecorder
    view: RunView
    measured: list[dict[str, float]] = field(default_factory=list)
    saved: int | None = None  # the step of the newest checkpoint
    asked: bool = False  # to write one out of turn, after the step under way
    _asked_step: int = -1
    _asking: asyncio.Task[Measured | None] | None = None  # an evaluation under way
    _writing: asyncio.Task[None] | None = None  # the newest checkpoint
    _committing: bool = False  # the thread that gives it its name has begun
    _asked_at: float = 0.0
    _doing: str = ""  # with the last step: what keeps the learner from the next one
    _since: float = 0.0

    def is_boundary(self, step: int) -> bool:
        """Whether the next step must wait for the evaluation or checkpoint of ``step``, which read its weights. Asked
        once a step: a checkpoint out of turn falls on this one."""
        config = self.state.config
        if self.asked:
            self.asked, self._asked_step = False, step
        return self._falls_on(step, config.evaluates_every) or self._saves(step) or step == config.steps

    def _saves(self, step: int) -> bool:
        regular = self._falls_on(step, self.state.config.checkpoint.every)
        return regular or step == self._asked_step < self.state.config.steps

    def _falls_on(self, step: int, every: int) -> bool:
        """Whether ``step`` is a multiple of ``every``. Not for the last step: the run's end evaluates and saves it."""
        return every > 0 and step % every == 0 and step < self.state.config.steps

    async def after_step(self, metrics: dict[str, Any]) -> None:
        """Record a step; evaluate and write a checkpoint where one is due."""
        try:
            await self._after_step(metrics, int(metrics["step"]))
        finally:
            self._doing = ""

    async def _after_step(self, metrics: dict[str, Any], step: int) -> None:
        if self._falls_on(step, self.state.config.evaluates_every):
            self._begin("evaluation")
            found: dict[str, Any] | None = await self.evaluate()
            metrics |= {"heldout_accuracy": None} if found is None else found
        self._begin("record")
        await off_loop(partial(self.recorder.log_step, metrics))
        await off_loop(partial(self.view.step, metrics))
        if self.view.stop_asked:
            self.state.stopping = True
            self.state.changed.notify()
        self.state.ledger.check()
        if self._writing is not None and self._writing.done():
            await self.settle()  # raises its error now
        if self._saves(step):
            self._begin("checkpoint")
            await self.save()

    def _begin(self, what: str) -> None:
        self._doing, self._since = what, self.state.now()

    def holds_up(self) -> str:
        """What of the last step is not done yet, such as "the evaluation of step 4, begun 6 s ago"; or nothing."""
        if not self._doing:
            return ""
        return f"the {self._doing} of step {self.state.version}, begun {self.state.now() - self._since:.0f} s ago"

    async def evaluate(self) -> dict[str, float] | None:
        """The evaluation's metrics for the weights that the replicas hold; None if nothing can be measured, or if the
        evaluation was cancelled because the run is stopping."""
        if self.state.stopping:
            return None
        if self.publisher.pulls.on:  # else replicas would be measured that have not loaded these weights yet
            await self.publisher.idle()
        # A share for a replica that is held back would have the run wait for it alone.
        brisk = [r for r in self.state.replicas if r.alive and not r.pace.held_back]
        asked = brisk or self.state.replicas
        self._asked_at = self.state.now()
        self._asking = asyncio.ensure_future(self.heldout.measure(asked, self.state))
        # A replica that comes back waits for a learner that is dead, and its answers would be waited for without end.
        lost = asyncio.ensure_future(self.state.changed.wait_for(lambda: self.publisher.failure))
        try:
            await asyncio.wait([self._asking, lost], return_when=asyncio.FIRST_COMPLETED)
            if not self._asking.done():
                self.publisher.raise_if_failed()
        finally:
            lost.cancel()
            self._asking.cancel()
            self.state.progressed()
        found = None if self._asking.cancelled() else self._asking.result()
        if found is None:
            return None
        self.measured.append(found.metrics)
        self.state.message(_said(found.metrics, self.state))
        if self.state.config.logging.rollouts:
            await off_loop(partial(write_answers, Path(self.recorder.run_dir), self.state.version, found.answers))
        if "heldout_accuracy" in found.metrics:
            await off_loop(partial(self.view.evaluated, self.state.version, found.metrics["heldout_accuracy"]))
        return found.metrics

    def give_up_evaluation(self) -> None:
        """Cancel an evaluation under way, which then has no result; without effect if there is none."""
        if self._asking is not None:
            self._asking.cancel()

    def waits(self) -> list[str]:
        """Sentences about an evaluation or a checkpoint under way."""
        if self._asking is None or self._asking.done():
            return []
        return [f"A held-out evaluation is under way, begun {self.state.now() - self._asked_at:.0f} s ago."]

    async def evaluate_end(self) -> None:
        """Evaluate before the first step and after the last, which no step's metrics include."""
        if (metrics := await self.evaluate()) is not None:
            state = self.state
            await off_loop(partial(self.view.evaluated_apart, state.version, state.elapsed, metrics))

    async def save(self) -> None:
        """Take a checkpoint of this step, after the previous checkpoint is written. When this returns, its content is
        fixed and the next step may begin; writing continues in the background, and :meth:`settle` waits for it. A
        scheduled mode first finishes all rollouts under way, so that a resumed run has the same batches, from the same
        versions, as an uninterrupted one; on the virtual clock, where that costs no time, every mode does."""
        await self.settle()
        state = self.state
        rests = not state.scheduled and state.config.runtime == "local" and not state.stopping
        try:
            rested = await self._rest() if rests else 0.0
            if state.scheduled:
                await self.publisher.idle()
                await state.changed.wait_for(lambda: not state.groups and state.gate.room(state.version) == 0)
            folder, keep = Path(self.recorder.run_dir), state.config.checkpoint.keep
            writer = await off_loop(partial(CheckpointWriter, folder, state.version, keep))
            async with self.turns.weights():
                await self.runtime.learner.save(writer.learner)
            await off_loop(partial(self.normalizer.save, writer.learner))
            # No await between these two: what the document counts as ended is what the records hold.
            document, payloads = snapshot_state(state, self.source, self.log)
        finally:
            state.resting = False  # also where the learner died
        document["heldout_before"] = self.measured[:1]
        document["elapsed"] += rested
        marker = self.log.mark()
        state.taken_version = state.version
        self._writing = asyncio.create_task(self._write(writer, document, payloads, marker), name="checkpoint")
        state.rests += rests
        state.progressed()

    async def _write(
        self, writer: CheckpointWriter, document: dict[str, Any], payloads: list[Payload], marker: RecordMarker
    ) -> None:
        """Let all parts write their files at the same time; then give the checkpoint's folder its final name."""
        try:
            rollouts = self.runtime.save_rollouts(writer.rollouts, payloads)
            await self.log.flush()
            await self.log.written([rollouts])
            rollouts.result()
            seals = await self.runtime.learner.saved()
            self._committing = True
            await off_loop(lambda: writer.commit(document, self.recorder.sealed(marker), seals))
        except OSError as error:
            raise CheckpointError(f"the checkpoint {writer.folder} could not be written: {error}.") from error
        finally:
            self._committing = False
        self.state.journal.note("checkpoint", step=document["version"])
        self.saved = self.state.saved_version = document["version"]
        self.state.progressed()

    async def give_up_writing(self) -> None:
        """The learner that was to write the checkpoint under way is lost: leave its folder unnamed. If a thread, which
        cannot be stopped, is already renaming the folder, wait for it: the run may go back to this checkpoint."""
        writing, self._writing = self._writing, None
        if writing is not None:
            if not self._committing:
                writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until the checkpoint under way, if any, is on disk; raises the error of a failed write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def close(self) -> None:
        """Wait for the checkpoint under way, unless the user stopped the run twice or writing takes longer than
        ``WRITE_OUT_SECONDS``: its folder then stays unnamed, and the next start removes it."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=0.0 if self.state.stopping else WRITE_OUT_SECONDS)
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _rest(self) -> float:
        """Finish all rollouts under way and load this step's weights on all replicas; returns the seconds taken."""
        state, begun = self.state, self.state.now()
        state.resting = True
        await state.changed.wait_for(lambda: not state.groups or state.stopping)
        await self.publisher.idle()
        if state.published_version < state.version:
            state.journal.note("rested", step=state.version)
            self.publisher.publish(state.version)
            await self.publisher.idle()
        # An engine reports its last responses when their step begins, and can start no other before it ends.
        await asyncio.sleep(2 * max(k.config.virtual_step_seconds for k in replica_kinds(state.config.generator)))
        return state.now() - begun


def _said(metrics: Mapping[str, float], state: RunState) -> str:
    """One sentence about an evaluation; the sets' figures follow the task's own."""
    how = f"{'' if state.config.evaluation.temperature else 'greedy '}{state.config.heldout_word}"
    own = metrics.get("heldout_accuracy")
    rest = {key.removeprefix("heldout_").removeprefix("heldout/"): value for key, value in metrics.items()}
    rest.pop("accuracy", None)
    figures = [*([f"{own:.3f}"] if own is not None else []), *(f"{key} {value:.3f}" for key, value in rest.items())]
    return f"Held-out {how} at version {state.version}: {', '.join(figures)}"
