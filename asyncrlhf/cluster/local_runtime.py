"""The local runtime: every part in this process, on a virtual clock, deterministic; the loops are the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from asyncrlhf.actors.critic import CriticSpec, CriticWorker
from asyncrlhf.actors.generator import GeneratorSpec, GeneratorWorker, build_worker, describe
from asyncrlhf.actors.learner import LearnerSpec, LearnerWorker
from asyncrlhf.actors.messages import Collected, Offer, RolloutBundle, TrainItem, WorkItem
from asyncrlhf.actors.reference import ReferenceSpec, ReferenceWorker
from asyncrlhf.actors.reward import RewardSpec, build_reward
from asyncrlhf.cluster.clock import Signal
from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.backend import StepResult
from asyncrlhf.records.recorder import RolloutRow, write_part
from asyncrlhf.rewards.chunked_messages import Chunk, ChunkInfo, Prefilled, describe_chunks
from asyncrlhf.rewards.scorer import Scorer
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.types import FloatArray, Payload, RewardResult, Rollout, RolloutInfo, ServiceResult, TrainSample


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
    return [p.ref[p.index] for p in payloads]


def _pieces(chunks: Sequence[ChunkInfo]) -> list[Chunk]:
    return [c.payload.ref[c.payload.index] for c in chunks]


class LocalReward:
    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def score(self, payloads: Sequence[Payload]) -> list[RewardResult]:
        return self._scorer.score(fetch_local(payloads))

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        return self._scorer.prefill(released, _pieces(chunks))

    async def close(self) -> None:
        """Nothing is held open."""


class LocalReference:
    def __init__(self, worker: ReferenceWorker) -> None:
        self._worker = worker

    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        return _placed(*self._worker.complete(fetch_local(payloads)))

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        return self._worker.prefill(released, _pieces(chunks))

    async def close(self) -> None:
        """Nothing is held open."""


class LocalCritic:
    def __init__(self, worker: CriticWorker) -> None:
        self._worker = worker

    async def value(self, payloads: Sequence[Payload], ticket: Ticket) -> list[ServiceResult]:
        return _placed(*self._worker.value(fetch_local(payloads), ticket))

    async def close(self) -> None:
        """Nothing is held open."""


def _placed(results: Sequence[ServiceResult], made: RolloutBundle) -> list[ServiceResult]:
    return [r if r.payload is None else replace(r, payload=Payload(made, r.payload.index)) for r in results]


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
        self._records = ThreadPoolExecutor(max_workers=1, thread_name_prefix="records")
        self.generators: list[GeneratorHandle] = []
        self.rewards: list[LocalReward] = []
        self.references: list[LocalReference] = []
        self.critics: list[LocalCritic] = []
        self.learner: LocalLearner

    async def start(self) -> None:
        self.learner = LocalLearner(LearnerWorker(self._learner_spec), self._learner_spec.learner.virtual_step_seconds)
        self.rewards = [LocalReward(build_reward(self._reward_spec)) for _ in range(self._reward_spec.reward.workers)]
        if self._reference_spec is not None:
            count = self._reference_spec.reference.workers
            self.references = [LocalReference(ReferenceWorker(self._reference_spec)) for _ in range(count)]
        if self._critic_spec is not None:
            names = [f"critic-{i}" for i in range(self._critic_spec.critic.workers)]
            self.critics = [LocalCritic(CriticWorker(self._critic_spec, name)) for name in names]
        self.generators = [self._generator(spec) for spec in self._specs.values()]

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

    def write_part(self, target: Path, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None]) -> Future[None]:
        rollouts = [None if p is None else p.ref[p.index] for p in payloads]
        return self._records.submit(write_part, target, rows, rollouts)

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        kept = list(rollouts)
        return [Payload(kept, i) for i in range(len(kept))]

    async def close(self) -> None:
        self._records.shutdown()
        for generator in self.generators:
            await generator.close()
        if hasattr(self, "learner"):
            await self.learner.close()
