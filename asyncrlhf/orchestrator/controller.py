"""The controller: starts the loops of a run, ends them, and keeps what they share.

    who              waits for                                            is woken by
    ---------------  ---------------------------------------------------  ---------------------------------------------
    Dispatcher       room at the gate, in the buffer and on a replica     a load (gate), a step or drop (buffer),
                                                                          a finished rollout (replica)
    collect (each    finished rollouts of its replica                     the replica
      replica)
    score (each      rollouts that fusion lets through                    collect
      reward worker)
    serve (each      rollouts, as they end; only with                     collect; WeightPublisher (a critic's version)
      reference or   reference.where=service, critic.where=service
      critic worker)
    LearnLoop        a batch in the buffer; in scheduled modes also the   score and serve; the publisher
                     publish before
    WeightPublisher  a snapshot; every live replica to have loaded it     LearnLoop; replicas (drain: collect)
    Recovery         a dead replica                                       whichever loop met the death
    Growth           nothing: it looks now and then whether the cluster has room for a replica more
    watch            nothing: it looks now and then whether anything moved

        ┌──────────▶ Dispatcher ──submit──▶ replicas ──collect──▶ Scoring ──▶ Assembly ──▶ ReplayBuffer ──┐
        │                                      ▲ load                                                   take
        └── ledger, gate, signal ──────── WeightPublisher ◀──snapshot── LearnLoop ◀───────────────────────┘

All loops share one thread and one :class:`~asyncrlhf.orchestrator.state.RunState`; between two awaits nothing else
runs, so the ledger, the gate and the buffer never disagree. A loop that raises ends the run; a loop that returns,
other than the learner's, does too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrlhf.buffer.admission import build_gate
from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.engines.groups import replica_kinds
from asyncrlhf.errors import AsyncRLHFError, StallError
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.critics import Critics, CriticVersions, valued
from asyncrlhf.orchestrator.dispatch import Dispatcher
from asyncrlhf.orchestrator.evaluation import HeldOut
from asyncrlhf.orchestrator.learn import LearnLoop
from asyncrlhf.orchestrator.recovery import Growth, Recovery
from asyncrlhf.orchestrator.references import References, completed
from asyncrlhf.orchestrator.resume import restore, snapshot_state
from asyncrlhf.orchestrator.rollout_log import RolloutLog
from asyncrlhf.orchestrator.scoring import Scoring
from asyncrlhf.orchestrator.service import Service
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.orchestrator.turns import Turns
from asyncrlhf.orchestrator.weight_sync import WeightPublisher
from asyncrlhf.records.checkpoint import CheckpointWriter, Saved
from asyncrlhf.records.progress import RunView
from asyncrlhf.records.recorder import RunRecorder
from asyncrlhf.types import SamplingParams

# With 1,000 replicas millions of small objects live for as long as a rollout. With Python's own thresholds a fifth of
# the controller's time is spent on looking for cycles among them.
GC_THRESHOLDS = (100_000, 20, 100)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done`` or ``interrupted``, with the ledger's totals and the held-out accuracies."""

    reason: str
    ledger: dict[str, Any]
    heldout_before: float | None
    heldout_after: float | None


def build_state(config: RunConfig) -> RunState:
    """Ledger, gate and buffer of a fresh run."""
    size = config.num_generations
    gate = build_gate(
        config.async_, config.buffer, batch_size=config.batch_size, num_generations=size, steps=config.steps
    )
    buffer = ReplayBuffer(
        config.buffer, config.async_, batch_size=config.batch_size, num_generations=size, seed=config.seed
    )
    return RunState(config, Ledger(), gate, buffer)


class Controller:
    """One run from start to end on a runtime that hosts the parts."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        source: PromptSource,
        sampling: SamplingParams,
        heldout: HeldOut,
        recorder: RunRecorder,
        view: RunView,
        vocab_size: int,
        saved: Saved | None = None,
    ) -> None:
        self.config = config
        self.state = build_state(config)
        self._runtime = runtime
        self._source = source
        self._sampling = sampling
        self._heldout = heldout
        self._recorder = recorder
        self._view = view
        self._saved = saved
        self._log = RolloutLog(self.state, runtime, recorder)
        self._assembly = Assembly(self.state, self._log.discard, view.message)
        self._recovery = Recovery(self.state, runtime, view.message)
        self._critic_versions = CriticVersions(self.state, runtime)
        hand_over = self._critic_versions.hand_over
        self._publisher = WeightPublisher(self.state, runtime, vocab_size, self._recovery.dead, hand_over)
        self._turns = Turns(self.state, runtime, self._publisher.idle, self._recovery.dead)
        self._services: list[Service[Any, Any]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._accuracy: list[float] = []

    def stop(self) -> None:
        """End after the step under way, with a checkpoint (the first Ctrl-C)."""
        self.state.stopping = True
        self.state.changed.notify()

    async def run(self) -> Outcome:
        """Raises what made a loop fail; the parts are left to the caller's ``runtime.close()``."""
        state = self.state
        gc.set_threshold(*GC_THRESHOLDS)
        await self._runtime.start()
        if self._runtime.sharing:
            names = ", ".join(sorted(self._runtime.sharing))
            self._view.message(f"Asleep while the learner trains on the same devices: {names}. Nothing overlaps there.")
        state.replicas.extend(Replica(handle) for handle in self._runtime.generators)
        if self._saved is not None:
            await self._runtime.learner.load(self._saved.learner)
            computed_by = self._saved.state.get("reference")
            rollouts = await completed(self._saved.rollouts, computed_by, self.config, self._runtime)
            rollouts = await valued(rollouts, self.config, self._runtime)
            restore(state, replace(self._saved, rollouts=rollouts), self._source, self._log, self._runtime)
        self._publisher.start(state.version, self._runtime.learner.snapshot(self._publisher.next_probe()))
        await self._publisher.idle()
        await self._evaluate()
        state.progressed()
        learn = LearnLoop(state, self._runtime, self._assembly, self._publisher, self._log, self, self._turns)
        self._view.begin()
        reason = await self._run_loops(learn)
        after = self._accuracy[-1] if reason == "done" and self._accuracy else None
        return Outcome(reason, state.ledger.counts(), self._accuracy[0] if self._accuracy else None, after)

    async def _run_loops(self, learn: LearnLoop) -> str:
        """Supervise every loop until the learner's is through with the run."""
        runtime, dead = self._runtime, self._recovery.dead
        critics = Critics(self.state, self._assembly, runtime.critics, self._critic_versions)
        onward = critics if runtime.critics else None
        references = References(self.state, self._assembly, runtime.references, onward)
        first = references if runtime.references else onward
        scoring = Scoring(self.state, self._assembly, runtime.rewards, dead, first)
        self._services = [scoring, references, critics]
        dispatcher = Dispatcher(self.state, self._source, self._sampling, self._recovery.dead)
        self._recovery.restarted = lambda replica: self._spawn(scoring.collect(replica), f"collect {replica.name}")
        if any(kind.config.max_replicas for kind in replica_kinds(self.config.generator)):
            growth = Growth(self.state, self._runtime, self._publisher, self._view.message, self._recovery.restarted)
            self._spawn(growth.run(), "growth")
        main = asyncio.create_task(self._main(learn), name="learn")
        self._tasks.add(main)
        self._spawn(dispatcher.run(), "dispatch")
        self._spawn(self._recovery.run(self._publisher, self._turns), "recovery")
        self._spawn(self._watch(learn), "watch")
        for replica in self.state.replicas:
            self._spawn(scoring.collect(replica), f"collect {replica.name}")
        for number, worker in enumerate(self._runtime.rewards):
            self._spawn(scoring.score(worker), f"score {number}")
        for number, reference in enumerate(runtime.references):
            self._spawn(references.serve(reference), f"reference {number}")
        for number, critic in enumerate(runtime.critics):
            self._spawn(critics.serve(critic), f"critic {number}")
        while not main.done():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._tasks.discard(task)
                task.result()
        return main.result()

    async def _main(self, learn: LearnLoop) -> str:
        """Train to the end or to the interruption, and leave everything in order."""
        await learn.run()
        if self.state.version < self.config.steps:
            await self._save()
            self._view.message(f"Interrupted: a checkpoint of step {self.state.version} is written.")
            return "interrupted"
        await learn.settle()
        if self.config.checkpoint.every:
            await self._save()
        await self._evaluate()
        self._assembly.abandon(sorted(self.state.groups), "shutdown")
        self._assembly.clear_buffer()
        self._log.mark()
        await self._log.flush()
        self.state.ledger.check()
        return "done"

    def _spawn(self, loop: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.add(asyncio.create_task(loop, name=name))

    def is_boundary(self, step: int) -> bool:
        """An evaluation or a checkpoint speaks of the weights between two steps."""
        return self._evaluates(step) or self._saves(step) or step == self.config.steps

    def _evaluates(self, step: int) -> bool:
        return self.config.eval_every > 0 and step % self.config.eval_every == 0 and step < self.config.steps

    def _saves(self, step: int) -> bool:
        return (
            self.config.checkpoint.every > 0 and step % self.config.checkpoint.every == 0 and step < self.config.steps
        )

    async def after_step(self, metrics: dict[str, Any]) -> None:
        step = int(metrics["step"])
        if self._evaluates(step):
            metrics["heldout_accuracy"] = await self._evaluate()
        await off_loop(partial(self._recorder.log_step, metrics))
        await off_loop(partial(self._view.step, metrics))
        self.state.ledger.check()
        if self._saves(step):
            await self._save()

    async def _evaluate(self) -> float | None:
        # A share for a replica that is held back would have the run wait for it alone.
        brisk = [r for r in self.state.replicas if r.alive and not r.pace.held_back]
        asked = brisk or self.state.replicas
        accuracy = await self._heldout.accuracy(asked, self._runtime.rewards, self._recovery.dead)
        if accuracy is not None:
            self._accuracy.append(accuracy)
            self._view.message(f"Held-out greedy accuracy at version {self.state.version}: {accuracy:.3f}")
        return accuracy

    async def _save(self) -> None:
        """A checkpoint of this step. A scheduled mode first lets its schedule come to rest, so that the resumed run
        has the very batches, from the very versions, that an uninterrupted one would have had."""
        state = self.state
        if state.scheduled:
            await self._publisher.idle()
            await state.changed.wait_for(lambda: not state.groups and state.gate.room(state.version) == 0)
        folder, keep = Path(self._recorder.run_dir), self.config.checkpoint.keep
        writer = await off_loop(partial(CheckpointWriter, folder, state.version, keep))
        await self._runtime.learner.save(writer.learner)
        # No await between these two: what the document counts as ended is what the records hold.
        document, payloads = snapshot_state(state, self._source, self._log)
        marker = self._log.mark()
        await self._log.flush()
        rollouts = await self._runtime.fetch(payloads)
        await off_loop(partial(writer.commit, document, {r.rollout_id: r for r in rollouts}, marker))
        state.progressed()

    async def close(self) -> None:
        """End every loop; the runtime's parts are closed by their owner."""
        await self._publisher.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            self._log.mark()
            await self._log.flush()
        except AsyncRLHFError as error:  # the recorder's end says it again, unless the run fails for another cause
            self._view.message(failure_sentence(error))

    async def _watch(self, learn: LearnLoop) -> None:
        """A run in which nothing moves ends with the name of what everybody waits for."""
        limit = self.config.stall_timeout_seconds
        while True:
            await asyncio.sleep(limit / 10)
            if self.state.now() - self.state.last_progress > limit:
                raise StallError(
                    f"Nothing moved for stall_timeout_seconds={limit:g}. {self._diagnosis(learn.training)}"
                )

    def _diagnosis(self, training: bool) -> str:
        state = self.state
        doing = "is in its step" if training else "waits for the batch of step"
        parts = [f"The learner {doing} {state.version}; the buffer holds {state.buffer.held} rollouts."]
        for replica in state.replicas:
            held = sorted(replica.in_flight)
            status = (
                "dead" if not replica.alive else "draining" if replica.draining else f"at version {replica.version}"
            )
            parts.append(f"{replica.name} is {status} with {len(held)} rollouts in flight{_some(held)}.")
        for service in self._services:
            if service.queued:
                parts.append(f"{len(service.queued)} rollouts wait for a {service.title}{_some(service.queued)}.")
        if self._publisher.busy:
            parts.append(f"The publisher waits for {self._publisher.waiting_for or 'a replica'}.")
        if state.requeue:
            parts.append(f"{len(state.requeue)} rollouts wait to be issued again{_some(list(state.requeue))}.")
        return " ".join(parts)


def _some(ids: list[int]) -> str:
    return f" (ids {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''})" if ids else ""


def failure_sentence(error: BaseException) -> str:
    """One line for the summary and the terminal: the cause first."""
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    return first if isinstance(error, AsyncRLHFError) else f"{type(error).__name__}: {first}"
