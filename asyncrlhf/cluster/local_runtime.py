"""The local runtime: every part in this process, on a virtual clock, deterministic, with the real loops."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

import numpy as np

from asyncrlhf.actors.annotator import AnnotatorSpec, AnnotatorWorker, build_annotator
from asyncrlhf.actors.build_generator import build_worker
from asyncrlhf.actors.episodes import EpisodeNews, EpisodeSpec, StepLanes, news_of, told
from asyncrlhf.actors.learner import LearnerLanes, LearnerSpec, LearnerWorker
from asyncrlhf.actors.messages import Collected, Offer, joined, placed
from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker, located
from asyncrlhf.cluster.clock import Signal
from asyncrlhf.cluster.handles import (
    LONG_SECONDS,
    AnnotatorHandle,
    EpisodesHandle,
    GeneratorHandle,
    Hear,
    LocalPart,
    P,
    R,
    Runtime,
    within,
)
from asyncrlhf.cluster.placement import Specs, first_turn
from asyncrlhf.data.checkpoint_manifest import Seals
from asyncrlhf.episodes.worker import EpisodeWorker
from asyncrlhf.errors import LearnerLostError, ReplicaError
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.readahead.owners import ChunkInfo, Prefilled
from asyncrlhf.records.write.rollout_rows import RolloutRow, write_part
from asyncrlhf.records.write.saved_rollouts import write_rollouts
from asyncrlhf.records.write.spans import Lane, SpanBatch
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, GenerationRequest, Payload, Rollout, RolloutInfo


def hear(told: Hear, *batches: SpanBatch) -> None:
    """Pass on a part's spans: all parts share the loop's clock."""
    for batch in batches:
        told(batch, batch.told, batch.told)


class LocalGenerator(LocalPart[GeneratorWorker]):
    """Steps its worker while there is work; a step costs ``virtual_step_seconds``, unless the engine says when its next
    step is due (the fake engine)."""

    def __init__(self, spec: GeneratorSpec, worker: GeneratorWorker, told: Hear) -> None:
        super().__init__(spec.name, worker)
        self._told, self._lane = told, Lane(spec.name, asyncio.get_running_loop().time, 0.0)
        self._spec, self.slots = spec, spec.generator.slots
        self._changed = Signal()
        self._killed: str | None = None
        self._task = asyncio.create_task(self._run(), name=f"engine {spec.name}")

    async def _run(self) -> None:
        loop, worker, timed = asyncio.get_running_loop(), self.worker, False
        while True:
            if not worker.has_work():
                self._lane.enter("wait")
            await self._changed.wait_for(worker.has_work)
            self._lane.enter("decode")
            started, sequences = loop.time(), worker.running
            output = worker.step()
            timed = timed or output.wake_at is not None  # it makes tokens by the clock, and a step takes no time
            self._lane.count(len(output.finished), output.tokens, 0 if timed else 1, 0 if timed else sequences)
            if timed and not worker.has_work():
                self._lane.enter("wait")
            if self._spec.chunk_tokens:
                worker.send_chunks()
            if output.finished or worker.outbox.has_chunks:
                self._changed.notify()
            if output.wake_at is None:
                await asyncio.sleep(self._spec.generator.virtual_step_seconds)
            elif output.wake_at > started:
                timer = loop.call_at(output.wake_at, self._changed.notify)
                await self._changed.wait_past(self._changed.count)  # or until a submit, a load, a cancellation
                timer.cancel()
            worker.worked(loop.time() - started)

    def kill(self, cause: str = "killed") -> None:
        """Die like a process (for tests): its rollouts are lost and every later call fails."""
        self._killed = cause
        self._task.cancel()
        self._changed.notify()

    def _ended(self) -> bool:
        return self._killed is not None or self._task.done()

    @property
    def beat(self) -> float:
        """The clock's time while the replica has work: it is making tokens."""
        at_work = self.worker.has_work() and not self._ended()
        return asyncio.get_running_loop().time() if at_work else -1.0

    async def ping(self, seconds: float) -> None:
        if self._ended():
            raise ReplicaError(f"{self.name} is at a standstill")

    def _check(self) -> None:
        if self._killed is not None:
            raise ReplicaError(f"{self.name} is dead: {self._killed}")
        if self._task.done():
            self._task.result()

    async def call(
        self, seconds: float, method: Callable[Concatenate[GeneratorWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._check()
        if method.__name__ == "load":
            with self._lane.during("load", args[0]):  # type: ignore[arg-type]
                answer = await super().call(seconds, method, *args, **kwargs)
        else:
            answer = await super().call(seconds, method, *args, **kwargs)
        self._changed.notify()
        return answer

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        await self.call(LONG_SECONDS, GeneratorWorker.submit, items)

    async def collect(self) -> Collected:
        box = self.worker.outbox
        await self._changed.wait_for(lambda: box.has_results or box.has_chunks or self._ended())
        self._check()
        now = asyncio.get_running_loop().time()
        hear(self._told, self._lane.take())
        return located(*box.take(self.worker.busy_seconds, self.worker.tokens, now), now)

    async def submit_turns(self, turns: Sequence[Payload]) -> None:
        await self.submit([turn.ref[turn.index] for turn in turns])

    async def generate_turn(self, rollout_id: int, turn: Payload) -> list[Rollout]:
        return await self.generate([turn.ref[turn.index]])

    async def generate(self, items: Sequence[GenerationRequest]) -> list[Rollout]:
        ids = [item.rollout_id for item in items]
        return await within(LONG_SECONDS, self.name, "generate", self._answers(items, ids), ids)

    async def _answers(self, items: Sequence[GenerationRequest], ids: Sequence[int]) -> list[Rollout]:
        await self.submit(items)
        done: list[Rollout] | None = None

        def look() -> bool:
            nonlocal done
            done = self.worker.outbox.take_private(ids)
            return done is not None or self._ended()

        await self._changed.wait_for(look)
        self._check()
        assert done is not None
        return done

    async def close(self) -> None:
        if not self._ended():
            hear(self._told, self._lane.take())
        self.kill("closed")  # calls that still wait for an answer fail
        await asyncio.gather(self._task, return_exceptions=True)
        await super().close()


def fetch_local(payloads: Sequence[Payload]) -> list[Rollout]:
    """The rollouts, with the arrays of their annotations."""
    return [joined(p.ref[p.index], (a.ref[a.index] for a in p.annotations)) for p in payloads]


class LocalAnnotator(LocalPart[AnnotatorWorker]):
    """A reward, reference or critic worker."""

    def __init__(self, name: str, worker: AnnotatorWorker, answer_seconds: float, told: Hear) -> None:
        super().__init__(name, worker)
        self._answer_seconds = answer_seconds
        self._told, self._lane = told, Lane(name, asyncio.get_running_loop().time, 0.0)

    async def annotate(self, payloads: Sequence[Payload], ticket: Ticket | None = None) -> list[Annotation]:
        rollouts = fetch_local(payloads)
        size = len(rollouts), sum(len(r.response_ids) for r in rollouts)
        with self._lane.during("score", None if ticket is None else ticket.version, *size):
            answer = await self.call(self._answer_seconds, AnnotatorWorker.annotate, rollouts, ticket)
        hear(self._told, self._lane.take())
        return placed(*answer)

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        pieces = [chunk.payload.ref[chunk.payload.index] for chunk in chunks]
        with self._lane.during("score", None, 0, sum(len(piece.token_ids) for piece in pieces)):
            return await self.call(self._answer_seconds, AnnotatorWorker.prefill, released, pieces)

    async def close(self) -> None:
        hear(self._told, self._lane.take())
        await super().close()


class LocalEpisodes(LocalPart[EpisodeWorker]):
    """Plays episodes on the run's own clock."""

    def __init__(self, name: str, build: Callable[[], EpisodeWorker], told: Hear) -> None:
        super().__init__(name, build())
        self._build, self._told = build, told
        self._lanes = StepLanes(self.worker)
        self._killed = asyncio.Event()
        self.restarts = 0

    def begin(self, items: Sequence[GenerationRequest]) -> None:
        self.worker.begin(items)

    def sampled(self, turns: Sequence[Payload]) -> None:
        self.worker.sampled(fetch_local(turns))

    def cancel(self, rollout_ids: Sequence[int]) -> None:
        self.worker.cancel(rollout_ids)

    def kill(self) -> None:
        """Die like a process (for tests): its episodes are lost."""
        self.worker.close()
        self._killed.set()

    async def collect(self) -> EpisodeNews:
        waits = [asyncio.ensure_future(event.wait()) for event in (self.worker.changed, self._killed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._killed.is_set():
            raise ReplicaError(f"{self.name} is dead")
        return self._news()

    def _news(self) -> EpisodeNews:
        news, requests, rollouts = news_of(self.worker, self._lanes)
        hear(self._told, *news.spans)
        return told(news, requests, rollouts, asyncio.get_running_loop().time())

    async def restart(self, error: ReplicaError, counts: bool = True) -> None:
        self.restarts += 1
        self.worker, self._killed = self._build(), asyncio.Event()
        self._lanes = StepLanes(self.worker)


class LocalLearner(LocalPart[LearnerWorker]):
    """One rank; a step costs ``virtual_step_seconds``, during which all other parts continue."""

    def __init__(self, spec: LearnerSpec, worker: LearnerWorker, told: Hear) -> None:
        super().__init__("learner-0", worker)
        self._spec, self._step_seconds = spec, spec.learner.virtual_step_seconds
        self._told, self._lanes = told, LearnerLanes(0, asyncio.get_running_loop().time, 0.0)
        self._killed: str | None = None

    def kill(self, cause: str = "killed") -> None:
        """Die like a process (for tests): a call under way is never answered, and every later one fails."""
        self._killed = cause

    def _check(self) -> None:
        if self._killed is not None:
            raise LearnerLostError(f"{self.name} died: {self._killed}")

    async def call(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._check()
        with self._lanes.during(method.__name__, self.worker, args):
            answer = await super().call(seconds, method, *args, **kwargs)
            if method.__name__ == "train":
                await asyncio.sleep(self._step_seconds)
        self._check()
        return answer

    async def train(self, rollouts: Sequence[RolloutInfo]) -> StepResult:
        chosen = [(((0, i),), r.reward, r.weight, r.masked_before_version) for i, r in enumerate(rollouts)]
        fetched = fetch_local([r.payload for r in rollouts])
        result = await self.call(LONG_SECONDS, LearnerWorker.train, chosen, fetched, **self._spec.recorded(rollouts))
        hear(self._told, *self._lanes.take())
        return result

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        offered: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        if self._killed is not None:
            offered.set_exception(LearnerLostError(f"{self.name} died: {self._killed}"))
            return offered
        with self._lanes.during("snapshot", self.worker, ()):
            answer: Any = self.worker.snapshot(probe)  # at once, and not when the answer is awaited
        if inspect.isawaitable(answer):
            return asyncio.ensure_future(answer)
        offered.set_result(answer)
        return offered

    async def every(
        self, seconds: float, method: Callable[Concatenate[LearnerWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return [await self.call(seconds, method, *args, **kwargs)]

    async def save(self, folder: Path) -> None:
        await self.call(LONG_SECONDS, LearnerWorker.save, folder)

    async def saved(self) -> Seals:
        return await self.call(LONG_SECONDS, LearnerWorker.saved)

    async def load(self, folder: Path) -> None:
        await self.call(LONG_SECONDS, LearnerWorker.load, folder)

    async def close(self) -> None:
        hear(self._told, *self._lanes.take())
        await super().close()


@dataclass(frozen=True)
class Workers:
    """How the worker of each part is built from its spec. Others may replace these to simulate a run: in a method that
    is a coroutine virtual time passes."""

    generator: Callable[[GeneratorSpec, Callable[[], float]], Any] = build_worker  # with the clock of the run
    learner: Callable[[LearnerSpec], Any] = LearnerWorker
    annotator: Callable[[AnnotatorSpec, str], Any] = build_annotator  # with its name
    episodes: Callable[[EpisodeSpec, str], EpisodeWorker] = lambda spec, name: spec.build(name, inline=True)


class LocalRuntime(Runtime):
    """For a controller inside :func:`~asyncrlhf.cluster.clock.run_virtual`."""

    def __init__(self, specs: Specs, sharing: Collection[str] = (), workers: Workers | None = None) -> None:
        """``sharing``: the generators that take turns with the learner."""
        self._workers = workers or Workers()
        self.tell = lambda text: None
        self.sharing = frozenset(sharing)
        self._specs = specs
        self._epoch = 0
        self._records = ThreadPoolExecutor(max_workers=1, thread_name_prefix="records")
        self.generators, self.episodes = [], []
        self.learner: LocalLearner

    async def start(self) -> None:
        self.learner = self._learner()
        asked = (self._specs.reward, self._specs.reference, self._specs.critic)
        self.rewards, self.references, self.critics = map(self._annotators, asked)
        self.episodes = self._episodes(self._specs.episodes)
        if self.sharing and self._specs.learner.offloads:
            self._specs = await first_turn(self.learner, self._specs, self.sharing)
        self.generators = [self._generator(spec) for spec in self._specs.generators]

    def _learner(self) -> LocalLearner:
        return LocalLearner(self._specs.learner, self._workers.learner(self._specs.learner), self.told)

    async def restart_learner(self) -> None:
        await self.learner.close()
        self.learner = self._learner()

    def _annotators(self, spec: AnnotatorSpec | None) -> list[AnnotatorHandle]:
        if spec is None:
            return []
        names = [f"{spec.kind}-{i}" for i in range(spec.settings.workers)]
        made = self._workers.annotator
        return [LocalAnnotator(name, made(spec, name), spec.answer_seconds, self.told) for name in names]

    def _episodes(self, spec: EpisodeSpec | None) -> list[EpisodesHandle]:
        if spec is None:
            return []
        names = [f"{spec.kind}-{i}" for i in range(spec.settings.workers)]
        return [LocalEpisodes(name, partial(self._workers.episodes, spec, name), self.told) for name in names]

    def _generator(self, spec: GeneratorSpec) -> LocalGenerator:
        worker = self._workers.generator(spec, asyncio.get_running_loop().time)
        return LocalGenerator(spec, worker, self.told)

    async def connect(self, receivers: Sequence[GeneratorHandle], workers: int = 0) -> int:
        self._epoch += 1
        names = [r.name for r in receivers]
        await self.learner.call(LONG_SECONDS, LearnerWorker.connect, "", names, self._epoch)
        return self._epoch

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        assert isinstance(dead, LocalGenerator)
        dead.kill("started again")  # it may hang rather than be dead
        fresh = self._generator(next(spec for spec in self._specs.generators if spec.name == dead.name))
        self.generators[:] = [fresh if g is dead else g for g in self.generators]
        return fresh

    async def add_generator(self, present: Collection[str]) -> GeneratorHandle | None:
        """None: one process gets no further machines."""
        return None

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        return fetch_local(payloads)

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        rollouts = [None if p is None else p.ref[p.index] for p in payloads]
        return self._records.submit(write_part, target, rows, rollouts)

    def save_rollouts(self, target: Path, payloads: Sequence[Payload]) -> Future[None]:
        return self._records.submit(write_rollouts, target, fetch_local(payloads))

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        return [Payload(rollouts, i) for i in range(len(rollouts))]

    async def close(self) -> None:
        self._records.shutdown()
        services: list[Any] = [*self.rewards, *self.references, *self.critics] if hasattr(self, "rewards") else []
        parts = (*self.generators, *services, *self.episodes, *([self.learner] if hasattr(self, "learner") else []))
        for answer in await asyncio.gather(*(part.close() for part in parts), return_exceptions=True):
            if isinstance(answer, BaseException):  # all others are closed
                raise answer
