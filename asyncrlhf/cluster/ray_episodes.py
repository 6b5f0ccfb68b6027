"""A worker that plays episodes, as the controller of a Ray run sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from asyncrlhf.actors.episodes import EpisodeActor, EpisodeNews, EpisodeSpec, told
from asyncrlhf.actors.messages import Alike
from asyncrlhf.cluster.handles import LONG_SECONDS
from asyncrlhf.cluster.ray_calls import ask
from asyncrlhf.cluster.ray_handles import PING, Options, RestartedPart, addressed
from asyncrlhf.episodes.worker import EpisodeWorker
from asyncrlhf.errors import ReplicaError
from asyncrlhf.types import GenerationRequest, Payload

NEWS = "news"  # the concurrency group of collect, so that the other calls arrive one by one, in their order


class RayEpisodes(RestartedPart[EpisodeWorker]):
    """A whole episode is its success; a death for which an episode has failed does not count."""

    def __init__(self, spec: EpisodeSpec, number: int, options: Options, start_seconds: float) -> None:
        self._spec = spec
        self._sent: list[Any] = []
        super().__init__(f"{spec.kind}-{number}", options, start_seconds, spec.max_restarts)

    def _start(self, name: str) -> Any:
        groups: Any = {PING: 1, NEWS: 1}
        return ray.remote(concurrency_groups=groups, **self._options)(EpisodeActor).remote(self._spec, name)  # type: ignore[call-overload]

    def begin(self, items: Sequence[GenerationRequest]) -> None:
        self._sent.append(self.actor.begin.remote(Alike(items)))

    def sampled(self, turns: Sequence[Payload]) -> None:
        addresses, bundles = addressed(turns)
        self._sent.append(self.actor.sampled.remote(addresses, *bundles))

    def cancel(self, rollout_ids: Sequence[int]) -> None:
        self._sent.append(self.actor.cancel.remote(list(rollout_ids)))

    async def collect(self) -> EpisodeNews:
        """The payloads are return values of their own: this process owns them, so that they outlive the worker."""
        sent, self._sent, asked = self._sent, [], asyncio.get_running_loop().time()
        facts, requests, rollouts = self.actor.collect.options(concurrency_group=NEWS, num_returns=3).remote()
        news: EpisodeNews = await ask(self.name, facts, LONG_SECONDS, "collect")
        for reference in sent:
            await ask(self.name, reference, LONG_SECONDS, "episodes")
        if news.finished:
            self._deaths = 0
        self.hear(news.spans, asked)
        return told(news, requests, rollouts, asyncio.get_running_loop().time())

    async def restart(self, error: ReplicaError, counts: bool = True) -> None:
        self._sent.clear()
        await self._revive(error, counts)
