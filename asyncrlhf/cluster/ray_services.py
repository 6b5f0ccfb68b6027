"""Reward, reference and critic workers of a Ray run as the controller sees them: they come back when they die."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from asyncrlhf.actors.critic import CriticActor, CriticSpec
from asyncrlhf.actors.reference import ReferenceActor, ReferenceSpec
from asyncrlhf.actors.reward import RewardActor, RewardSpec
from asyncrlhf.actors.where import Where
from asyncrlhf.cluster.handles import WorkerLostError
from asyncrlhf.cluster.ray_calls import addressed, ask, ask_to_start
from asyncrlhf.cluster.remote import LONG_SECONDS
from asyncrlhf.errors import ReplicaError
from asyncrlhf.readahead.messages import ChunkInfo, Prefilled
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Payload, RewardResult, ServiceResult

Options = Mapping[str, Any]


class RayService:
    """Started anew when it dies, here and not by Ray, whose retries would hide which call was the death of it."""

    def __init__(
        self, name: str, start: Callable[[], Any], start_seconds: float, max_restarts: int, setting: str
    ) -> None:
        """``start`` makes the actor; ``setting`` bounds its restarts."""
        self._name = name
        self._start = start
        self._start_seconds = start_seconds
        self._max_restarts, self._setting = max_restarts, setting
        self._deaths = 0  # since the last answer
        self._replaced: ReplicaError | None = None  # a death that no caller heard of
        self.actor = start()

    @property
    def name(self) -> str:
        return self._name

    async def ready(self) -> None:
        await ask_to_start(self._name, self.actor.ready.remote(), self._start_seconds)

    async def where(self) -> Where:
        place: Where = await ask(self._name, self.actor.where.remote(), self._start_seconds, "where")
        return place

    async def _twice(self, call: Callable[[], Any]) -> Any:
        """The first death may have been any: a call is made once more before its rollouts are blamed."""
        try:
            return await self._once(call)
        except WorkerLostError:
            raise
        except ReplicaError as error:
            if self._deaths > 1:
                raise
            answer = await self._once(call)
            self._replaced = error
            return answer

    async def _once(self, call: Callable[[], Any]) -> Any:
        """Raises ReplicaError when the worker died of it and stands again, WorkerLostError when it does not."""
        try:
            answer = await ask(self._name, call(), LONG_SECONDS, "its call")
        except ReplicaError as error:
            await self._revive(error)
            raise
        self._deaths = 0
        return answer

    async def _revive(self, error: ReplicaError) -> None:
        self._deaths += 1
        ray.kill(self.actor)
        if self._deaths > self._max_restarts:
            raise WorkerLostError(f"{error} It is not started again ({self._setting}).") from error
        self.actor = self._start()
        try:
            await self.ready()
        except ReplicaError as failure:
            raise WorkerLostError(f"{failure} It had died before: {error}") from failure

    async def _bundled(self, call: Callable[[], Any]) -> list[ServiceResult]:
        """``call`` returns two references: the results, and the bundle in which the rollouts lie. The bundle's owner is
        this process, so it outlives the worker."""
        bundles: list[Any] = []

        def once() -> Any:
            facts, made = call()
            bundles.append(made)
            return facts

        results: list[ServiceResult] = await self._twice(once)
        return [
            result if result.payload is None else replace(result, payload=Payload(bundles[-1], result.payload.index))
            for result in results
        ]

    async def close(self) -> None:
        ray.kill(self.actor)


class RayReader(RayService):
    """A service that may read chunks ahead."""

    async def prefill(self, released: Sequence[int], chunks: Sequence[ChunkInfo]) -> Prefilled:
        if self._replaced is not None:  # the chunks' beginnings are gone
            error, self._replaced = self._replaced, None
            raise error
        wanted, references = addressed([chunk.payload for chunk in chunks])
        answer: Prefilled = await self._once(lambda: self.actor.prefill.remote(list(released), wanted, *references))
        return answer


class RayReward(RayReader):
    def __init__(self, spec: RewardSpec, number: int, options: Options, start_seconds: float) -> None:
        super().__init__(
            f"reward-{number}",
            lambda: ray.remote(RewardActor).options(**options).remote(spec),
            start_seconds,
            spec.reward.max_restarts,
            "reward.max_restarts",
        )

    async def score(self, payloads: Sequence[Payload]) -> list[RewardResult]:
        wanted, references = addressed(payloads)
        results: list[RewardResult] = await self._twice(lambda: self.actor.score.remote(wanted, *references))
        return results


class RayReference(RayReader):
    def __init__(self, spec: ReferenceSpec, number: int, options: Options, start_seconds: float) -> None:
        super().__init__(
            f"reference-{number}",
            lambda: ray.remote(ReferenceActor).options(**options).remote(spec),
            start_seconds,
            spec.reference.max_restarts,
            "reference.max_restarts",
        )

    async def complete(self, payloads: Sequence[Payload]) -> list[ServiceResult]:
        wanted, references = addressed(payloads)
        return await self._bundled(lambda: self.actor.complete.options(num_returns=2).remote(wanted, *references))


class RayCritic(RayService):
    def __init__(self, spec: CriticSpec, number: int, options: Options, start_seconds: float) -> None:
        name = f"critic-{number}"
        super().__init__(
            name,
            lambda: ray.remote(CriticActor).options(**options).remote(spec, name),
            start_seconds,
            spec.critic.max_restarts,
            "critic.max_restarts",
        )

    async def value(self, payloads: Sequence[Payload], ticket: Ticket) -> list[ServiceResult]:
        wanted, references = addressed(payloads)
        return await self._bundled(lambda: self.actor.value.options(num_returns=2).remote(ticket, wanted, *references))
