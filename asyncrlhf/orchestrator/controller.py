"""The controller: starts the loops of a run, ends them, and keeps what they share.

    who              waits for                                            is woken by
    ---------------  ---------------------------------------------------  ---------------------------------------------
    Dispatcher       room at the gate, in the buffer and on a replica     a load (gate), a step or drop (buffer),
                                                                          a finished rollout (replica)
    collect (each    finished rollouts of its replica                     the replica
      replica)
    serve (each      finished rollouts: reward workers those that         collect; WeightPublisher (a critic's version)
      reward, refe-  fusion lets through, critic workers those whose
      rence, critic  critic is published
      worker)
    LearnLoop        a batch in the buffer; in scheduled modes also the   serve; the publisher
                     publish before
    WeightPublisher  a snapshot; every live replica to have loaded it     LearnLoop; replicas (drain: collect)
    Recovery         a dead replica; beside it, where replicas may be     the loop that met the death (state.died)
                     added, nothing: it looks now and then for room
    watch            nothing: it looks now and then whether anything moved

        ┌──────────▶ Dispatcher ──submit──▶ replicas ──collect──▶ Annotators ▶ Assembly ─▶ ReplayBuffer ──┐
        │                                      ▲ load                                                   take
        └── ledger, gate, signal ──────── WeightPublisher ◀──snapshot── LearnLoop ◀───────────────────────┘

All loops share one thread and one :class:`~asyncrlhf.orchestrator.state.RunState`; between two awaits nothing else
runs, so the ledger, the gate and the buffer never disagree. A loop that raises ends the run; a loop that returns,
other than the learner's, does too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from asyncrlhf.buffer.admission import build_gate
from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import AsyncRLHFError, StallError, full_disk
from asyncrlhf.orchestrator.annotate import Annotator, Collector, References, Rewards
from asyncrlhf.orchestrator.assembly import Assembly
from asyncrlhf.orchestrator.bookkeeping import Bookkeeping, HeldOut
from asyncrlhf.orchestrator.critics import Critics, CriticVersions
from asyncrlhf.orchestrator.dispatch import Dispatcher
from asyncrlhf.orchestrator.learn import LearnLoop
from asyncrlhf.orchestrator.normalize import RewardNormalizer
from asyncrlhf.orchestrator.recovery import Recovery
from asyncrlhf.orchestrator.resume import completed, restore
from asyncrlhf.orchestrator.rollout_log import RolloutLog
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.orchestrator.turns import Turns
from asyncrlhf.orchestrator.weight_sync import WeightPublisher
from asyncrlhf.records.checkpoint import Saved
from asyncrlhf.records.progress import RunView
from asyncrlhf.records.recorder import RunRecorder
from asyncrlhf.types import SamplingParams

# With 1,000 replicas millions of small objects live for as long as a rollout. With Python's own thresholds a fifth of
# the controller's time is spent on looking for cycles among them.
GC_THRESHOLDS = (100_000, 20, 100)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done`` or ``interrupted``, with the held-out accuracies."""

    reason: str
    heldout_before: float | None
    heldout_after: float | None


def build_state(config: RunConfig, message: Callable[[str], None] = lambda text: None) -> RunState:
    """Ledger, gate and buffer of a fresh run."""
    size = config.num_generations
    gate = build_gate(
        config.async_, config.buffer, batch_size=config.batch_size, num_generations=size, steps=config.steps
    )
    buffer = ReplayBuffer(
        config.buffer, config.async_, batch_size=config.batch_size, num_generations=size, seed=config.seed
    )
    return RunState(config, Ledger(), gate, buffer, message)


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
        self.state = build_state(config, view.message)
        self.state.published = view.published
        self._runtime = runtime
        self._source = source
        self._sampling = sampling
        self._view = view
        self._saved = saved
        self._log = RolloutLog(self.state, runtime, recorder)
        self._assembly = Assembly(self.state, self._log.discard)
        self._normalizer = RewardNormalizer(config.reward)
        self._critic_versions = CriticVersions(self.state, runtime)
        hand_over = self._critic_versions.hand_over
        self._publisher = WeightPublisher(self.state, runtime, vocab_size, hand_over)
        self._turns = Turns(self.state, runtime, self._publisher.idle)
        self._bookkeeping = Bookkeeping(
            self.state, runtime, source, heldout, self._publisher, self._normalizer, self._log, recorder, view
        )  # fmt: skip
        self._annotators: list[Annotator] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: asyncio.Task[Any] | None = None  # until the first weights are published

    def stop(self) -> str:
        """End after the step under way, with a checkpoint (the first Ctrl-C); an evaluation is given up, and so is a
        start, which leaves nothing to save. Returns a sentence that says which."""
        self.state.stopping = True
        if self._starting is not None:
            self._starting.cancel()
            return "Stopping while the run starts: no step was trained, and no checkpoint is written."
        self._bookkeeping.give_up_evaluation()
        self.state.changed.notify()
        return "Finishing the step under way and writing a checkpoint."

    async def run(self) -> Outcome:
        """Raises what made a loop fail; the parts are left to the caller's ``runtime.close()``."""
        state = self.state
        gc.set_threshold(*GC_THRESHOLDS)
        self._starting = asyncio.current_task()
        await self._runtime.start()
        if self._runtime.sharing:
            names = ", ".join(sorted(self._runtime.sharing))
            self.state.message(f"Asleep while the learner trains on the same devices: {names}. Nothing overlaps there.")
        state.replicas.extend(Replica(handle) for handle in self._runtime.generators)
        if self._saved is not None:
            await self._runtime.learner.load(self._saved.learner)
            self._normalizer.load(self._saved.learner)
            saved = await completed(self._saved, self.config, self._runtime)
            restore(state, saved, self._source, self._log, self._runtime)
            self._bookkeeping.accuracies += saved.state.get("heldout_before", [])  # the baseline is the first run's
        self._publisher.publish(state.version)
        await self._publisher.idle()
        self._starting = None
        await self._bookkeeping.evaluate_end()
        state.progressed()
        learn = LearnLoop(
            state, self._runtime, self._assembly, self._publisher, self._log, self._bookkeeping, self._turns,
            self._normalizer,
        )  # fmt: skip
        self._view.begin()
        reason = await self._run_loops(learn)
        accuracies = self._bookkeeping.accuracies
        after = accuracies[-1] if reason == "done" and accuracies else None
        return Outcome(reason, accuracies[0] if accuracies else None, after)

    async def _run_loops(self, learn: LearnLoop) -> str:
        """Supervise every loop until the learner's is through with the run."""
        runtime = self._runtime
        kinds = (
            Rewards(self.state, self._assembly, runtime.rewards),
            References(self.state, self._assembly, runtime.references),
            Critics(self.state, self._assembly, runtime.critics, self._critic_versions),
        )
        self._annotators = [annotator for annotator in kinds if annotator.workers]
        collector = Collector(self.state, self._assembly, self._annotators)
        dispatcher = Dispatcher(self.state, self._source, self._sampling)

        def collect(replica: Replica) -> None:
            self._spawn(collector.collect(replica), f"collect {replica.name}")

        recovery = Recovery(self.state, runtime, self._publisher, self._turns, collect)
        if any(kind.config.max_replicas for kind in replica_kinds(self.config.generator)):
            self._spawn(recovery.grow(), "growth")
        main = asyncio.create_task(self._main(learn), name="learn")
        self._tasks.add(main)
        self._spawn(dispatcher.run(), "dispatch")
        self._spawn(recovery.restart(), "recovery")
        self._spawn(self._watch(learn), "watch")
        for replica in self.state.replicas:
            collect(replica)
        for annotator in self._annotators:
            for number, worker in enumerate(annotator.workers):
                self._spawn(annotator.serve(worker), f"{annotator.kind} {number}")
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
            return await self._interrupted()
        await learn.settle()
        if self.config.checkpoint.every:
            await self._bookkeeping.save()
        await self._bookkeeping.evaluate_end()
        if self.state.stopping:
            return await self._interrupted()
        self._assembly.abandon(sorted(self.state.groups), "shutdown")
        self._assembly.clear_buffer()
        self._log.mark()
        await self._log.flush()
        self.state.ledger.check()
        return "done"

    async def _interrupted(self) -> str:
        await self._bookkeeping.save()
        self.state.message(f"Interrupted: a checkpoint of step {self.state.version} is written.")
        return "interrupted"

    def _spawn(self, loop: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.add(asyncio.create_task(loop, name=name))

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
            self.state.message(failure_sentence(error))

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
        for annotator in self._annotators:
            if queued := annotator.queued:
                parts.append(f"{len(queued)} rollouts wait for a {annotator.title}{_some(queued)}.")
        if self._publisher.busy:
            parts.append(f"The publisher waits for {self._publisher.waiting_for or 'a replica'}.")
        if state.requeue:
            parts.append(f"{len(state.requeue)} rollouts wait to be issued again{_some(list(state.requeue))}.")
        return " ".join(parts)


def _some(ids: list[int]) -> str:
    return f" (ids {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''})" if ids else ""


def failure_sentence(error: BaseException) -> str:
    """One line for the summary and the terminal: the cause first."""
    if full := full_disk(error):
        return full
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    return first if isinstance(error, AsyncRLHFError) else f"{type(error).__name__}: {first}"
