"""The local runtime: every part in this process, on a virtual clock, deterministic; the loops are the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from asyncrlhf.actors.annotator import AnnotatorSpec, AnnotatorWorker
from asyncrlhf.actors.critic import CriticSpec
from asyncrlhf.actors.generator import GeneratorSpec, GeneratorWorker, build_worker, describe
from asyncrlhf.actors.learner import LearnerSpec, LearnerWorker
from asyncrlhf.actors.messages import Collected, Offer, TrainItem, WorkItem, joined, placed
from asyncrlhf.actors.reference import ReferenceSpec
from asyncrlhf.actors.reward import RewardSpec
from asyncrlhf.cluster.clock import Signal
from asyncrlhf.cluster.handles import AnnotatorHandle, GeneratorHandle
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.backend import StepResult
from asyncrlhf.rewards.chunked_messages import Chunk, ChunkInfo, Prefilled, describe_chunks
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.types import Annotation, FloatArray, Payload, Rollout, RolloutInfo, TrainSample


class LocalGenerator:
    """Steps its worker whenever there is work; one step costs ``step_seconds`` of virtual time unless the engine says
    itself when it wants to be looked at again (the fake engine)."""

    def __init__(self, worker: GeneratorWorker, step_seconds: float) -> None:
        self._worker = worker
        self._step_seconds = step_seconds
        self._changed = Signal()
        self._busy = 0.0
        self._ended: dict[int, float] = {}  # when each finished rollout got its last token
        self._chunks: list[Chunk] = []
        self._killed: str | None = None
        self._task = asyncio.create_task(self._run(), name=f"engine {worker.name}")

    @property
    def name(self) -> str:
        return self._worker.name

    @property
    def slots(self) -> int:
        return self._worker.engine.slots

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait_for(self._worker.has_work)
            started = loop.time()
            output = self._worker.step(started)
            self._ended.update((result.rollout_id, loop.time()) for result in output.finished)
            self._chunks += self._worker.take_chunks()
            if output.finished or self._chunks:
                self._changed.notify()
            if output.wake_at is None:
                await asyncio.sleep(self._step_seconds)
            elif output.wake_at > started:
                await self._nap(output.wake_at)
            self._busy += loop.time() - started

    async def _nap(self, until: float) -> None:
        """Sleep until then, or until something changes (a submit, a load, a cancellation)."""
        waiter = asyncio.ensure_future(self._changed.wait_for(_once()))
        loop = asyncio.get_running_loop()
        timer = loop.call_at(until, self._changed.notify)
        await waiter
        timer.cancel()

    def kill(self, cause: str = "killed") -> None:
        """Die as a process would (for tests): what it held is gone and every call fails from now on."""
        self._killed = cause
        self._task.cancel()
        self._changed.notify()

    def _check(self) -> None:
        if self._killed is not None:
            raise ReplicaError(f"{self.name} is dead: {self._killed}")
        if self._task.done():
            self._task.result()

    async def submit(self, items: Sequence[WorkItem]) -> None:
        self._check()
        self._worker.submit(items)
        self._changed.notify()

    async def collect(self) -> Collected:
        await self._changed.wait_for(
            lambda: self._worker.has_results() or self._chunks or self._killed is not None or self._task.done()
        )
        self._check()
        rollouts, failures = self._worker.take()
        now = asyncio.get_running_loop().time()
        ended, self._ended = self._ended, {}
        chunks, self._chunks = self._chunks, []
        finished = [_bind(info, rollouts, ended.get(info.rollout_id, now)) for info in describe(rollouts)]
        begun = [replace(info, payload=Payload(chunks, info.payload.index)) for info in describe_chunks(chunks)]
        return Collected(finished, failures, self._busy, self._worker.tokens, chunks=begun)

    async def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        self._check()
        gone = self._worker.cancel(rollout_ids)
        self._changed.notify()
        return gone

    async def generate(self, items: Sequence[WorkItem]) -> list[Rollout]:
        await self.submit(items)
        ids = [item.request.rollout_id for item in items]
        done: list[Rollout] | None = None

        def look() -> bool:
            nonlocal done
            done = self._worker.take_private(ids)
            return done is not None or self._killed is not None or self._task.done()

        await self._changed.wait_for(look)
        self._check()
        assert done is not None
        return done

    async def receive(self, ticket: Ticket) -> None:
        self._check()
        self._worker.receive(ticket)

    async def load(self, version: int, cache: Literal["keep", "recompute"]) -> float:
        self._check()
        self._worker.load(version, cache, asyncio.get_running_loop().time())
        self._changed.notify()
        return 0.0

    async def sleep(self) -> None:
        self._check()
        self._worker.sleep(asyncio.get_running_loop().time())
        self._changed.notify()

    async def wake(self) -> None:
        self._check()
        self._worker.wake()
        self._changed.notify()

    async def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        self._check()
        return self._worker.score(texts)

    async def digests(self) -> dict[str, str]:
        self._check()
        return self._worker.digests()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._worker.close()


def _once() -> Callable[[], bool]:
    """A condition that is false at the first look and true ever after."""
    looks = iter([False])
    return lambda: next(looks, True)


def _bind(info: RolloutInfo, rollouts: list[Rollout], now: float) -> RolloutInfo:
    return replace(info, payload=Payload(rollouts, info.payload.index), generated_at=now)


def fetch_local(payloads: Sequence[Payload]) -> list[Rollout]:
    """The rollouts, with the arrays of their annotations."""
    return [joined(p.ref[p.index], (a.ref[a.index] for a in p.annotations)) for p in payloads]


class LocalAnnotator:
    """A reward, reference or critic worker; its calls cost no virtual time."""

    def __init__(self, worker: AnnotatorWorker) -> None:
        self.worker = worker

    async def annotate(self, payloads: Sequence[Payload], ticket: Ticket | None = None) -> list[Annotation]:
        return placed(*self.worker.annotate(fetch_local(payloads), ticket))

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        return self.worker.prefill(released, [c.payload.ref[c.payload.index] for c in chunks])

    async def close(self) -> None:
        """Nothing is held open."""


class LocalLearner:
    """One rank; a step costs ``step_seconds`` of virtual time, during which everything else goes on."""

    def __init__(self, worker: LearnerWorker, step_seconds: float) -> None:
        self.worker = worker
        self._step_seconds = step_seconds

    async def train(self, items: Sequence[TrainItem]) -> StepResult:
        rollouts = fetch_local([item.payload for item in items])
        samples = [
            TrainSample(rollout, item.reward, item.weight, item.masked_before_version)
            for rollout, item in zip(rollouts, items, strict=True)
        ]
        result = self.worker.train(samples)
        await asyncio.sleep(self._step_seconds)
        return result

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        offered: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        offered.set_result(self.worker.snapshot(probe))
        return offered

    async def ticket(self) -> Ticket:
        return self.worker.require_sender().ticket()

    async def critic_ticket(self) -> Ticket:
        return self.worker.critic_ticket()

    async def transfer(self, ticket: Ticket) -> TransferStats:
        return self.worker.require_sender().transfer(ticket)

    async def release(self, version: int) -> None:
        self.worker.require_sender().release(version)

    async def digests(self, dtype: str) -> dict[str, str]:
        return self.worker.digests(dtype)

    async def save(self, folder: Path) -> None:
        self.worker.save(folder)

    async def load(self, folder: Path) -> None:
        self.worker.load(folder)

    async def close(self) -> None:
        self.worker.close()


class LocalRuntime:
    """Give it to a controller inside :func:`~asyncrlhf.cluster.clock.run_virtual`."""

    def __init__(
        self,
        generators: Sequence[GeneratorSpec],
        learner: LearnerSpec,
        reward: RewardSpec,
        sharing: Collection[str] = (),
        reference: ReferenceSpec | None = None,
        critic: CriticSpec | None = None,
    ) -> None:
        """``sharing``: the generators that take turns with the learner."""
        self.sharing = frozenset(sharing)
        self._specs = {spec.name: spec for spec in generators}
        self._learner_spec = learner
        self._reward_spec = reward
        self._reference_spec, self._critic_spec = reference, critic
        self._epoch = 0
        self.generators: list[GeneratorHandle] = []
        self.rewards: list[AnnotatorHandle] = []
        self.references: list[AnnotatorHandle] = []
        self.critics: list[AnnotatorHandle] = []
        self.learner: LocalLearner

    async def start(self) -> None:
        self.learner = LocalLearner(LearnerWorker(self._learner_spec), self._learner_spec.learner.virtual_step_seconds)
        self.rewards = self._annotators(self._reward_spec)
        self.references = self._annotators(self._reference_spec)
        self.critics = self._annotators(self._critic_spec)
        self.generators = [self._generator(spec) for spec in self._specs.values()]

    def _annotators(self, spec: AnnotatorSpec | None) -> list[AnnotatorHandle]:
        if spec is None:
            return []
        return [LocalAnnotator(spec.build(f"{spec.kind}-{i}")) for i in range(spec.settings.workers)]

    def _generator(self, spec: GeneratorSpec) -> LocalGenerator:
        return LocalGenerator(build_worker(spec), spec.generator.virtual_step_seconds)

    async def connect(self, receivers: Sequence[GeneratorHandle]) -> None:
        self._epoch += 1
        self.learner.worker.require_sender().connect("", [r.name for r in receivers], self._epoch)

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        fresh = self._generator(self._specs[dead.name])
        self.generators[:] = [fresh if g is dead else g for g in self.generators]
        return fresh

    async def add_generator(self, present: Collection[str]) -> GeneratorHandle | None:
        """None: one process has no machines that come later."""
        return None

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        return fetch_local(payloads)

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        kept = list(rollouts)
        return [Payload(kept, i) for i in range(len(kept))]

    async def close(self) -> None:
        for generator in self.generators:
            await generator.close()
        if hasattr(self, "learner"):
            await self.learner.close()
