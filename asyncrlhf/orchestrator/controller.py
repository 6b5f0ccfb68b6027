"""The controller: starts the loops of a run, ends them, and keeps what they share.

    who              waits for                                            is woken by
    ---------------  ---------------------------------------------------  ---------------------------------------------
    Dispatcher       room at the gate, in the buffer and on a replica     a load (gate), a step or drop (buffer),
                                                                          a finished rollout (replica)
    collect (each    finished rollouts of its replica                     the replica
      replica)
    serve (each      turns that episodes want sampled, ended episodes     the episode worker
      episode worker)
    serve (each      finished rollouts: reward workers those that         collect; WeightPublisher (a critic's version)
      reward, refe-  fusion lets through, critic workers those whose
      rence, critic  critic is published
      worker)
    LearnLoop        a batch in the buffer; in scheduled modes also the   serve; the publisher
                     publish before
    WeightPublisher  a snapshot; every live replica to have loaded it     LearnLoop; replicas (drain: collect)
    Rollback         nothing: it runs in the LearnLoop's place when the       the learner's death
                     learner has died
    Recovery         a dead replica; beside it, where replicas may be     the loop that met the death (state.died)
                     added, nothing: it regularly checks for room
    Supervisor       nothing: it regularly checks for progress

        ┌──────────▶ Dispatcher ──submit──▶ replicas ──collect──▶ Annotators ▶ Assembly ─▶ ReplayBuffer ──┐
        │                                      ▲ load                                                   take
        └── ledger, gate, signal ──────── WeightPublisher ◀──snapshot── LearnLoop ◀───────────────────────┘

All loops share one thread and one :class:`~asyncrlhf.orchestrator.state.RunState`; between two awaits nothing else
runs, so the ledger, the gate and the buffer never disagree. A loop that raises ends the run; a loop that returns,
other than the learner's, does too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrlhf.buffer.admission import build_gate
from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.cluster.calls import keep_calls
from asyncrlhf.cluster.clock import VirtualClockLoop, off_loop
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import AsyncRLHFError, LearnerLostError, ReplicaError, StallError, failure_sentence
from asyncrlhf.garbage import only_new_garbage
from asyncrlhf.orchestrator.learning.bookkeeping import Bookkeeping
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.learning.normalize import RewardNormalizer
from asyncrlhf.orchestrator.learning.rollback import Rollback, beginning
from asyncrlhf.orchestrator.recording.resume import completed, restore
from asyncrlhf.orchestrator.recording.rollout_log import RolloutLog
from asyncrlhf.orchestrator.replicas.recovery import Recovery
from asyncrlhf.orchestrator.replicas.turns import Turns
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.rollouts.annotate import Annotator, Collector, References, Rewards
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.rollouts.critics import Critics, CriticVersions
from asyncrlhf.orchestrator.rollouts.dispatch import Dispatcher
from asyncrlhf.orchestrator.rollouts.episodes import Episodes
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.orchestrator.supervisor import Supervisor
from asyncrlhf.records.show.progress import RunView
from asyncrlhf.records.write.checkpoint import Saved
from asyncrlhf.records.write.journal import Journal
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.types import SamplingParams

R = TypeVar("R")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done`` or ``interrupted``, with the metrics of the first and last held-out evaluation."""

    reason: str
    before: Mapping[str, float]
    after: Mapping[str, float]


def build_state(
    config: RunConfig, message: Callable[[str], None] = lambda text: None, journal: Journal | None = None
) -> RunState:
    """Ledger, gate and buffer of a fresh run; the default journal is kept in memory only."""
    size = config.num_generations
    gate = build_gate(
        config.async_, config.buffer, batch_size=config.batch_size, num_generations=size, steps=config.steps
    )
    buffer = ReplayBuffer(
        config.buffer, config.async_, batch_size=config.batch_size, num_generations=size, seed=config.seed
    )
    return RunState(config, Ledger(), gate, buffer, message, journal=journal or Journal())


class Controller:
    """Runs one training run from start to end on a runtime that hosts the parts."""

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
        self.state = build_state(config, view.message, recorder.journal)
        self.state.published = view.published
        self._runtime, runtime.survived = runtime, self.state.survived
        self._source = source
        self._sampling = sampling
        self._view = view
        self._saved = saved
        self._run_dir = recorder.run_dir
        self._log = RolloutLog(self.state, runtime, recorder)
        self._assembly = Assembly(self.state, self._log.discard, source)
        self._normalizer = RewardNormalizer(config.reward)
        self._critic_versions = CriticVersions(self.state, runtime)
        self._publisher = WeightPublisher(self.state, runtime, vocab_size, self._critic_versions.hand_over)
        self._turns = Turns(self.state, runtime, self._publisher.idle)
        self._bookkeeping = Bookkeeping(
            self.state, runtime, source, heldout, self._publisher, self._turns, self._normalizer, self._log, recorder,
            view,
        )  # fmt: skip
        self._annotators: list[Annotator] = []
        self._heldout = heldout
        self._episodes: Episodes | None = None
        self.supervisor = Supervisor(self.state, runtime, self._publisher, self._annotators, self._bookkeeping.waits)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._starting: asyncio.Task[Any] | None = None  # until the first weights are published

    def stop(self, limit: str) -> str:
        """End the run after the step under way, with a checkpoint within ``limit`` (the first Ctrl-C). An evaluation is
        cancelled, and a run that is still starting, without a checkpoint. Returns a sentence that says which."""
        self.state.stopping = True
        if self._starting is not None:
            self._starting.cancel()
            return "Stopping while the run starts: no step was trained, and no checkpoint is written."
        self._bookkeeping.give_up_evaluation()
        self.state.changed.notify()
        return f"Finishing the step under way and writing a checkpoint within {limit}."

    async def run(self) -> Outcome:
        """Run to the end. Raises the error of a loop that failed, or CancelledError when a signal ended the run early;
        the caller closes the parts by ``runtime.close()``."""
        with only_new_garbage():
            return await self._run()

    async def _run(self) -> Outcome:
        self._starting = asyncio.current_task()
        self.supervisor.calls = keep_calls()
        self.state.progressed()
        journal = self.state.journal
        journal.clock = asyncio.get_running_loop().time  # also after the loop
        journal.begin(self._saved.step if self._saved is not None else 0, self.config)
        await off_loop(journal.write)
        await self._runtime.start()
        if self._runtime.sharing:
            names = ", ".join(sorted(self._runtime.sharing))
            self.state.message(f"Asleep while the learner trains on the same devices: {names}. Nothing overlaps there.")
        self.state.replicas.extend(Replica(handle) for handle in self._runtime.generators)
        try:
            reason = await self._supervised()
        except (ReplicaError, StallError) as error:
            if not self.state.stopping:
                raise
            last = self._bookkeeping.saved
            there = "there is none" if last is None else f"the last one is of step {last}"
            self.state.message(
                f"{failure_sentence(error)} No checkpoint of step {self.state.version} could be written; {there}."
            )
            raise asyncio.CancelledError from error
        measured = self._bookkeeping.measured or [{}]
        return Outcome(reason, measured[0], measured[-1] if reason == "done" else {})

    async def _supervised(self) -> str:
        """Start the loops and watch them until the run ends; returns the outcome's reason."""
        kinds = (
            Rewards(self.state, self._assembly, self._runtime.rewards),
            References(self.state, self._assembly, self._runtime.references),
            Critics(self.state, self._assembly, self._runtime.critics, self._critic_versions),
        )
        self._annotators += [annotator for annotator in kinds if annotator.workers]
        if self._runtime.episodes:
            self._episodes = Episodes(self.state, self._runtime, self._assembly, self._annotators)
            self._heldout.play = self._episodes.answer
            for number, worker in enumerate(self._runtime.episodes):
                self._spawn(self._episodes.serve(worker), f"episodes {number}")
        turned = None if self._episodes is None else self._episodes.turned
        collector = Collector(self.state, self._assembly, self._annotators, turned)

        def collect(replica: Replica) -> None:
            self._spawn(collector.collect(replica), f"collect {replica.name}")

        recovery = Recovery(self.state, self._runtime, self._publisher, self._turns, collect)
        self._spawn(self.supervisor.watch(), "watch")
        self._spawn(recovery.restart(), "recovery")
        for replica in self.state.replicas:
            collect(replica)
        main = self._spawn(self._main(recovery), "main")
        while not main.done():
            task = await self._ended.get()
            self._tasks.discard(task)
            task.result()
        return main.result()

    async def _main(self, recovery: Recovery) -> str:
        """Train from the first published weights to the last record, and restart after each death of the learner."""
        begun = await self._take_up()
        self._starting = None
        self._doing("evaluates")
        self._view.stage("first evaluation")
        await self._bookkeeping.evaluate_end()
        loop = asyncio.get_running_loop()
        if self._saved is not None and isinstance(loop, VirtualClockLoop):
            loop.go_on_at(self._saved.state["clock"])
        learn = LearnLoop(
            self.state, self._runtime, self._assembly, self._publisher, self._log, self._bookkeeping, self._turns,
            self._normalizer,
        )  # fmt: skip
        back = Rollback(
            self.state, self._runtime, self._source, self._publisher, self._critic_versions, self._turns,
            self._normalizer, self._log, learn, self._assembly, self._run_dir, begun,
        )  # fmt: skip
        self._view.begin()
        self.supervisor.learn = learn
        self._doing("trains")
        if any(kind.config.max_replicas for kind in replica_kinds(self.config.generator)):
            self._spawn(recovery.grow(), "growth")
        dispatcher = Dispatcher(self.state, self._source, self._sampling, self._publisher.pulls, self._episodes)
        self._spawn(dispatcher.run(), "dispatch")
        for annotator in self._annotators:
            for number, worker in enumerate(annotator.workers):
                self._spawn(annotator.serve(worker), f"{annotator.kind} {number}")
        while True:
            try:
                return await self._train(learn)
            except LearnerLostError as error:
                await back.recover(error)

    async def _take_up(self) -> Saved:
        """Restore the checkpoint, if any, and load the first weights on every replica. Returns the state at the
        start."""
        state = self.state
        begun = beginning(state, self._source, self._log)
        async with self._turns.weights():
            if self._saved is not None:
                self._doing("takes up its checkpoint")
                await self._runtime.learner.load(self._saved.learner)
            await self._publisher.prepare()
        if self._saved is not None:
            begun = self._saved
            state.progressed()
            self._normalizer.load(self._saved.learner)
            saved = await completed(self._saved, self.config, self._runtime, state.progressed)
            restore(state, saved, self._source, self._log, self._runtime)
            self._assembly.take_up()
            self._bookkeeping.saved = state.version
            self._bookkeeping.measured += saved.state.get("heldout_before", [])  # the first run's baseline
        self._doing("publishes its first weights")
        self._publisher.publish(state.version)
        await self._publisher.idle()
        return begun

    def _doing(self, what: str) -> None:
        self.supervisor.doing = what
        self.state.progressed()

    async def _train(self, learn: LearnLoop) -> str:
        """Train until the last step or an interruption; then write the last checkpoint, evaluation and records."""
        await learn.run()
        self._doing("ends")
        if self.state.version < self.config.steps:
            return await self._interrupted()
        await learn.settle()
        if self.config.saves_at_end:
            await self._bookkeeping.save()
        await self._bookkeeping.evaluate_end()
        if self.state.stopping:
            return await self._interrupted()
        await self._bookkeeping.settle()  # until here the learner may die, and the run go back
        self._end_loops()
        self._assembly.cancel(sorted(self.state.groups), "shutdown")
        self._assembly.drop(self.state.buffer.groups(), "shutdown")
        self._log.mark()
        await self._log.flush()
        self.state.ledger.check()
        return "done"

    async def _interrupted(self) -> str:
        await self._bookkeeping.save()
        await self._bookkeeping.settle()
        self.state.message(f"Interrupted: a checkpoint of step {self.state.version} is written.")
        return "interrupted"

    def _end_loops(self) -> None:
        """Cancel all loops but the main one and the supervisor, which still watches the writing of the last records."""
        for task in self._tasks:
            if task.get_name() not in ("main", "watch"):
                task.remove_done_callback(self._ended.put_nowait)
                task.cancel()
        for replica in self.state.replicas:
            replica.in_flight.clear()

    def _spawn(self, loop: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        task = asyncio.create_task(loop, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)
        return task

    async def close(self) -> None:
        """End every loop; the owner of the runtime closes its parts."""
        await self._bookkeeping.close()
        await self._publisher.close()
        if self._episodes is not None:
            await self._episodes.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            self._log.mark()
            await self._log.flush()
        except AsyncRLHFError as error:  # the recorder's end says it again, unless the run fails for another cause
            self.state.message(failure_sentence(error))
