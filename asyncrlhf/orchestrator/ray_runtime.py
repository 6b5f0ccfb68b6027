"""The Ray runtime: every part an actor; token arrays go from actor to actor through the object store."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrlhf.actors.generator import GeneratorActor, GeneratorSpec
from asyncrlhf.actors.learner import LearnerActor, LearnerSpec
from asyncrlhf.actors.messages import Collected, Offer, RolloutBundle, TrainItem, WorkItem
from asyncrlhf.actors.reward import RewardActor, RewardSpec
from asyncrlhf.errors import ReplicaError
from asyncrlhf.learner.base import StepResult
from asyncrlhf.orchestrator.config import RayConfig
from asyncrlhf.orchestrator.handles import GeneratorHandle, RewardHandle
from asyncrlhf.transport.base import LostReceiversError, Ticket, TransferStats
from asyncrlhf.types import FloatArray, Payload, RewardResult, Rollout

START_SECONDS = 600.0
# glibc gives freed memory back to the system after every step and takes it again page by page at the next; with these
# the actors of a local run keep it (measured: a fifth more samples/s on the tiny model). Read when a process starts.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(10**9),
    "MALLOC_TRIM_THRESHOLD_": str(2 * 10**9),
    "MALLOC_TOP_PAD_": str(10**8),
}
CLOSE_SECONDS = 5.0


async def ask(name: str, reference: Any) -> Any:
    """Await an actor's answer. Its own exception comes out as it was raised; its death as a ReplicaError."""
    try:
        return await reference
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayActorError as error:
        lines = str(error).strip().splitlines()
        if error.actor_init_failed:  # the message is a traceback
            raise ReplicaError(f"{name} could not start: {lines[-1].strip()}") from None
        raise ReplicaError(f"{name} died: {lines[0]}") from None
    except RayError as error:
        raise ReplicaError(f"{name} did not answer: {type(error).__name__}: {str(error).splitlines()[0]}") from None


async def ask_to_start(name: str, reference: Any) -> Any:
    """As :func:`ask`, but with an end: Ray itself waits for ever for CPUs or GPUs that no machine has."""
    try:
        return await asyncio.wait_for(ask(name, reference), START_SECONDS)
    except TimeoutError:
        total, free = ray.cluster_resources(), ray.available_resources()
        offer = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        raise ReplicaError(f"{name} did not start within {START_SECONDS:g} s; free in Ray: {offer}.") from None


def bundle(payloads: Sequence[Payload]) -> tuple[list[Any], list[int]]:
    """The distinct object references behind payloads, and each payload's place among them."""
    places: dict[Any, int] = {}
    order = [places.setdefault(p.ref, len(places)) for p in payloads]
    return list(places), order


class RayGenerator:
    def __init__(self, spec: GeneratorSpec) -> None:
        options = {"num_cpus": spec.generator.threads, "num_gpus": spec.generator.gpus, "max_concurrency": 8}
        self.spec = spec
        self.actor = ray.remote(GeneratorActor).options(**options).remote(spec)
        self._submitted: list[Any] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def slots(self) -> int:
        return self.spec.generator.slots

    async def ready(self) -> None:
        await ask_to_start(self.name, self.actor.ready.remote())

    async def submit(self, items: Sequence[WorkItem]) -> None:
        """Waits for no answer: a replica that hangs must not keep work from the others. ``collect`` raises what it
        raised."""
        self._submitted.append(self.actor.submit.remote(items))

    async def collect(self) -> Collected:
        """The payload is a return value of its own: its owner is this process, so it outlives the replica."""
        submitted, self._submitted = self._submitted, []
        facts, payload = self.actor.collect.options(num_returns=2).remote()
        collected: Collected = await ask(self.name, facts)
        for reference in submitted:
            await ask(self.name, reference)
        now = asyncio.get_running_loop().time()
        finished = [
            replace(info, payload=Payload(payload, info.payload.index), generated_at=now) for info in collected.finished
        ]
        return replace(collected, finished=finished)

    async def cancel(self, rollout_ids: Sequence[int]) -> list[int]:
        gone: list[int] = await ask(self.name, self.actor.cancel.remote(rollout_ids))
        return gone

    async def generate(self, items: Sequence[WorkItem]) -> list[Rollout]:
        rollouts: list[Rollout] = await ask(self.name, self.actor.generate.remote(items))
        return rollouts

    async def receive(self, ticket: Ticket) -> None:
        await ask(self.name, self.actor.receive.remote(ticket))

    async def join(self, endpoint: str, rank: int, world_size: int, epoch: int) -> None:
        """Enter the weight group of ``epoch``."""
        await ask(self.name, self.actor.connect.remote(endpoint, rank, world_size, epoch))

    async def load(self, version: int, cache: Literal["keep", "recompute"]) -> float:
        seconds: float = await ask(self.name, self.actor.load.remote(version, cache))
        return seconds

    async def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        logprobs: list[FloatArray] = await ask(self.name, self.actor.score.remote(texts))
        return logprobs

    async def digests(self) -> dict[str, str]:
        digests: dict[str, str] = await ask(self.name, self.actor.digests.remote())
        return digests

    async def close(self) -> None:
        await _close(self.actor)


class RayReward:
    def __init__(self, spec: RewardSpec, number: int) -> None:
        self._name = f"reward-{number}"
        self.actor = ray.remote(RewardActor).options(num_cpus=0, max_restarts=3, max_task_retries=3).remote(spec)

    async def ready(self) -> None:
        await ask_to_start(self._name, self.actor.ready.remote())

    async def score(self, payloads: Sequence[Payload]) -> list[RewardResult]:
        references, places = bundle(payloads)
        wanted = [(place, p.index) for place, p in zip(places, payloads, strict=True)]
        results: list[RewardResult] = await ask(self._name, self.actor.score.remote(wanted, *references))
        return results

    async def close(self) -> None:
        ray.kill(self.actor)


class RayLearner:
    """All ranks take part in every step; rank 0 alone sends weights."""

    def __init__(self, spec: LearnerSpec) -> None:
        ranks = spec.learner.ranks
        options = {"num_cpus": spec.learner.threads, "num_gpus": spec.learner.gpus, "max_concurrency": 4}
        remote = ray.remote(LearnerActor).options(**options)
        self.ranks = [remote.remote(spec, rank, ranks) for rank in range(ranks)]

    async def ready(self) -> None:
        address = await ask_to_start("learner-0", self.ranks[0].rendezvous.remote())
        setups = [ask_to_start(f"learner-{i}", rank.setup.remote(address)) for i, rank in enumerate(self.ranks)]
        await asyncio.gather(*setups)

    async def _all(self, call: Any) -> list[Any]:
        references = [call(rank) for rank in self.ranks]
        return await asyncio.gather(*(ask(f"learner-{i}", r) for i, r in enumerate(references)))

    async def _first(self, reference: Any) -> Any:
        return await ask("learner-0", reference)

    async def train(self, items: Sequence[TrainItem]) -> StepResult:
        references, places = bundle([item.payload for item in items])
        chosen = [
            (place, item.payload.index, item.reward, item.weight, item.masked_before_version)
            for place, item in zip(places, items, strict=True)
        ]
        results: list[StepResult] = await self._all(lambda rank: rank.train.remote(chosen, *references))
        return results[0]

    async def snapshot(self, probe: Sequence[np.ndarray] | None) -> Offer:
        offer: Offer = await self._first(self.ranks[0].snapshot.remote(probe))
        return offer

    async def listen(self) -> str:
        endpoint: str = await self._first(self.ranks[0].listen.remote())
        return endpoint

    async def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        await self._first(self.ranks[0].connect.remote(endpoint, receivers, epoch))

    async def ticket(self) -> Ticket:
        ticket: Ticket = await self._first(self.ranks[0].ticket.remote())
        return ticket

    async def transfer(self, ticket: Ticket) -> TransferStats:
        stats: TransferStats = await self._first(self.ranks[0].transfer.remote(ticket))
        return stats

    async def digests(self) -> dict[str, str]:
        digests: dict[str, str] = await self._first(self.ranks[0].digests.remote())
        return digests

    async def save(self, folder: Path) -> None:
        await self._all(lambda rank: rank.save.remote(str(folder.resolve())))

    async def load(self, folder: Path) -> None:
        await self._all(lambda rank: rank.load.remote(str(folder.resolve())))

    async def close(self) -> None:
        await asyncio.gather(*(_close(rank) for rank in self.ranks))


def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


async def _close(actor: Any) -> None:
    """Let it close what it holds open, then end its process whatever it answered."""
    await asyncio.wait([asyncio.ensure_future(_quietly(actor))], timeout=CLOSE_SECONDS)
    ray.kill(actor)


async def _quietly(actor: Any) -> None:
    try:
        await actor.close.remote()
    except RayError:
        return  # it is gone already, which is what closing is for


class RayRuntime:
    """Starts Ray for the run unless it runs already or ``ray.address`` names a cluster; stops what it started."""

    def __init__(
        self, config: RayConfig, generators: Sequence[GeneratorSpec], learner: LearnerSpec, reward: RewardSpec
    ) -> None:
        self._config = config
        self._generator_specs = list(generators)
        self._learner_spec = learner
        self._reward_spec = reward
        self._owns_ray = False
        self._endpoint = ""
        self._epoch = 0
        self.generators: list[GeneratorHandle] = []
        self.rewards: list[RewardHandle] = []
        self.learner: RayLearner

    def _cpus(self) -> int:
        learner = self._learner_spec.learner
        return sum(s.generator.threads for s in self._generator_specs) + learner.ranks * learner.threads + 1

    def _init_ray(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        for name, value in MALLOC.items():
            os.environ.setdefault(name, value)  # inherited by Ray's processes, and by nothing else that matters
        terminate = signal.getsignal(signal.SIGTERM)
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if self._config.address:
            ray.init(address=self._config.address, **common)
        else:
            # As many logical CPUs as the parts ask for: a laptop with fewer cores shares them.
            ray.init(
                num_cpus=max(self._cpus(), os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=self._config.object_store_mb * 2**20,
                **common,
            )
        # Ray puts its own handler there, which ends the process on the spot; a run ends with a checkpoint.
        signal.signal(signal.SIGTERM, terminate)
        self._owns_ray = True

    async def start(self) -> None:
        self._init_ray()
        self.learner = RayLearner(self._learner_spec)
        self.rewards = [RayReward(self._reward_spec, i) for i in range(self._reward_spec.reward.workers)]
        self.generators = [RayGenerator(spec) for spec in self._generator_specs]
        parts = [self.learner, *self.rewards, *self.generators]
        await asyncio.gather(*(part.ready() for part in parts))  # type: ignore[attr-defined]
        self._endpoint = await self.learner.listen()

    async def connect(self, receivers: Sequence[GeneratorHandle]) -> None:
        """Raises LostReceiversError naming those that died or hung: they are not waited for, all others are."""
        self._epoch += 1
        names = [r.name for r in receivers]
        joins = [
            asyncio.create_task(r.join(self._endpoint, rank, len(names) + 1, self._epoch))
            for rank, r in enumerate(receivers, start=1)
            if isinstance(r, RayGenerator)
        ]
        lost: dict[str, str] = {}
        try:
            await self.learner.connect(self._endpoint, names, self._epoch)
        except LostReceiversError as error:
            lost.update(error.receivers)
        except BaseException:
            _cancel(joins)
            raise
        _cancel([join for name, join in zip(names, joins, strict=True) if name in lost])
        for name, outcome in zip(names, await asyncio.gather(*joins, return_exceptions=True), strict=True):
            if isinstance(outcome, ReplicaError):
                lost.setdefault(name, "died")
            elif isinstance(outcome, Exception) and not lost:
                raise outcome
        if lost:
            raise LostReceiversError(f"The weight group of epoch {self._epoch} could not form", lost)

    async def restart(self, dead: GeneratorHandle) -> GeneratorHandle:
        assert isinstance(dead, RayGenerator)
        ray.kill(dead.actor)
        fresh = RayGenerator(dead.spec)
        await fresh.ready()
        self.generators[:] = [fresh if g is dead else g for g in self.generators]
        return fresh

    async def fetch(self, payloads: Sequence[Payload]) -> list[Rollout]:
        references, places = bundle(payloads)
        bundles = await asyncio.gather(*(ask("the object store", r) for r in references))
        return [bundles[place][p.index] for place, p in zip(places, payloads, strict=True)]

    def store(self, rollouts: Sequence[Rollout]) -> list[Payload]:
        kept = RolloutBundle(rollouts)
        reference = ray.put(kept)
        return [Payload(reference, i) for i in range(len(kept))]

    async def close(self) -> None:
        if not ray.is_initialized():
            return
        parts = [*self.generators, *self.rewards, *([self.learner] if hasattr(self, "learner") else [])]
        await asyncio.gather(*(part.close() for part in parts), return_exceptions=True)
        if self._owns_ray:
            ray.shutdown()
