"""Generators and learner of a Ray run as the controller sees them: one handle an actor (or a group of ranks)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayError

from asyncrlhf.actors.generator import GeneratorActor, GeneratorSpec
from asyncrlhf.actors.learner import LearnerActor, LearnerSpec
from asyncrlhf.actors.messages import Collected, Offer, TrainItem, WorkItem
from asyncrlhf.actors.where import Where
from asyncrlhf.cluster.ray_calls import START_SECONDS, addressed, ask, ask_to_start
from asyncrlhf.learner.backend import StepResult
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.types import FloatArray, Payload, Rollout

Options = Mapping[str, Any]  # Ray's, of one actor: what it asks for and where it sits
CLOSE_SECONDS = 5.0


class RayGenerator:
    def __init__(
        self, spec: GeneratorSpec, options: Options | None = None, start_seconds: float = START_SECONDS
    ) -> None:
        own = {"num_cpus": spec.generator.threads, "num_gpus": spec.generator.gpus} if options is None else options
        self.spec = spec
        self.actor = ray.remote(GeneratorActor).options(max_concurrency=8, **own).remote(spec)
        self._start_seconds = start_seconds
        self._submitted: list[Any] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def slots(self) -> int:
        return self.spec.generator.slots

    async def ready(self) -> None:
        await ask_to_start(self.name, self.actor.ready.remote(), self._start_seconds)

    async def submit(self, items: Sequence[WorkItem]) -> None:
        """Waits for no answer: a replica that hangs must not keep work from the others. ``collect`` raises what it
        raised."""
        self._submitted.append(self.actor.submit.remote(items))

    async def collect(self) -> Collected:
        """The payload is a return value of its own: its owner is this process, so it outlives the replica."""
        submitted, self._submitted = self._submitted, []
        values = 3 if self.spec.chunk_tokens else 2
        facts, payload, *chunks = self.actor.collect.options(num_returns=values).remote()
        collected: Collected = await ask(self.name, facts)
        for reference in submitted:
            await ask(self.name, reference)
        now = asyncio.get_running_loop().time()
        finished = [
            replace(info, payload=Payload(payload, info.payload.index), generated_at=now - age)
            for info, age in zip(collected.finished, collected.ages, strict=True)
        ]
        begun = [replace(info, payload=Payload(chunks[0], info.payload.index)) for info in collected.chunks]
        return replace(collected, finished=finished, chunks=begun)

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

    async def sleep(self) -> None:
        await ask(self.name, self.actor.sleep.remote())

    async def wake(self) -> None:
        await ask(self.name, self.actor.wake.remote())

    async def where(self) -> Where:
        place: Where = await ask(self.name, self.actor.where.remote())
        return place

    async def score(self, texts: Sequence[np.ndarray]) -> list[FloatArray]:
        logprobs: list[FloatArray] = await ask(self.name, self.actor.score.remote(texts))
        return logprobs

    async def digests(self) -> dict[str, str]:
        digests: dict[str, str] = await ask(self.name, self.actor.digests.remote())
        return digests

    async def close(self) -> None:
        await _close(self.actor)


class RayLearner:
    """All ranks take part in every step; rank 0 alone sends weights."""

    def __init__(self, spec: LearnerSpec, options: Sequence[Options], start_seconds: float) -> None:
        """``options``: of each rank."""
        ranks, self._sharded = spec.learner.ranks, spec.learner.sharded
        remote = ray.remote(LearnerActor)
        self.ranks = [
            remote.options(max_concurrency=4, **own).remote(spec, rank, ranks) for rank, own in enumerate(options)
        ]
        self._snapshots = [0] * ranks  # asked of each rank so far
        self._start_seconds = start_seconds

    async def ready(self) -> None:
        """Raises ReplicaError naming the rank that does not start."""
        seconds = self._start_seconds
        address = await ask_to_start("learner-0", self.ranks[0].rendezvous.remote(), seconds)
        setups = [
            ask_to_start(f"learner-{i}", rank.setup.remote(address), seconds) for i, rank in enumerate(self.ranks)
        ]
        await asyncio.gather(*setups)

    async def keep_to(self, cores: Sequence[Collection[int]]) -> None:
        """Bind each rank to its cores."""
        await self._answers([rank.keep_to.remote(own) for rank, own in zip(self.ranks, cores, strict=True)])

    async def where(self) -> list[Where]:
        """Of each rank."""
        return await self._all(lambda rank: rank.where.remote())

    async def blind(self, folder: Path) -> list[str]:
        """Addresses of the ranks' machines on which the folder does not exist."""
        seen = await self._all(lambda rank: rank.sees.remote(str(folder.resolve())))
        places = await self.where()
        return sorted({place.address for place, sees in zip(places, seen, strict=True) if not sees})

    async def _all(self, call: Any) -> list[Any]:
        return await self._answers([call(rank) for rank in self.ranks])

    async def _answers(self, references: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*(ask(f"learner-{i}", r) for i, r in enumerate(references)))

    async def _first(self, reference: Any) -> Any:
        return await ask("learner-0", reference)

    async def train(self, items: Sequence[TrainItem]) -> StepResult:
        addresses, references = addressed([item.payload for item in items])
        chosen = [
            (address, item.reward, item.weight, item.masked_before_version)
            for address, item in zip(addresses, items, strict=True)
        ]
        calls = zip(self.ranks, self._snapshots, strict=True)
        results: list[StepResult] = await self._answers(
            [rank.train.remote(chosen, snapshots, *references) for rank, snapshots in calls]
        )
        return results[0]

    def snapshot(self, probe: Sequence[np.ndarray] | None) -> Awaitable[Offer]:
        """Rank 0's offer; of all ranks where they hold shards. A rank works off several calls at a time, in any order:
        those that come later say how many snapshots they follow."""
        asked = self.ranks if self._sharded else self.ranks[:1]
        for number in range(len(asked)):
            self._snapshots[number] += 1
        return self._first_answer([rank.snapshot.remote(probe) for rank in asked])

    async def _first_answer(self, references: Sequence[Any]) -> Any:
        return (await self._answers(references))[0]

    async def listen(self) -> str:
        endpoint: str = await self._first(self.ranks[0].listen.remote())
        return endpoint

    async def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        await self._first(self.ranks[0].connect.remote(endpoint, receivers, epoch))

    async def ticket(self) -> Ticket:
        ticket: Ticket = await self._first(self.ranks[0].ticket.remote())
        return ticket

    async def critic_ticket(self) -> Ticket:
        ticket: Ticket = await self._first(self.ranks[0].critic_ticket.remote())
        return ticket

    async def transfer(self, ticket: Ticket) -> TransferStats:
        stats: TransferStats = await self._first(self.ranks[0].transfer.remote(ticket))
        return stats

    async def release(self, version: int) -> None:
        await self._first(self.ranks[0].release.remote(version))

    async def digests(self, dtype: str) -> dict[str, str]:
        digests: dict[str, str] = await self._first(self.ranks[0].digests.remote(dtype))
        return digests

    async def save(self, folder: Path) -> None:
        path = str(folder.resolve())
        calls = zip(self.ranks, self._snapshots, strict=True)
        await self._answers([rank.save.remote(path, snapshots) for rank, snapshots in calls])

    async def load(self, folder: Path) -> None:
        await self._all(lambda rank: rank.load.remote(str(folder.resolve())))

    async def close(self) -> None:
        await asyncio.gather(*(_close(rank) for rank in self.ranks))


async def _close(actor: Any) -> None:
    """Let it close what it holds open, then end its process whatever it answered."""
    await asyncio.wait([asyncio.ensure_future(_quietly(actor))], timeout=CLOSE_SECONDS)
    ray.kill(actor)


async def _quietly(actor: Any) -> None:
    try:
        await actor.close.remote()
    except RayError:
        return  # it is gone already, which is what closing is for
