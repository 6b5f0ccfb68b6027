"""A worker that plays episodes, as the controller of a Ray run sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from asyncrlhf.actors.episodes import EpisodeActor, EpisodeNews, EpisodeSpec, told
from asyncrlhf.actors.messages import Alike
from asyncrlhf.cluster.handles import LONG_SECONDS, WorkerLostError
from asyncrlhf.cluster.ray_calls import ask
from asyncrlhf.cluster.ray_handles import PING, Options, RayPart, addressed
from asyncrlhf.episodes.worker import EpisodeWorker
from asyncrlhf.errors import ReplicaError
from asyncrlhf.types import GenerationRequest, Payload

NEWS = "news"  # the concurrency group of collect, so that the other calls arrive one by one, in their order


class RayEpisodes(RayPart[EpisodeWorker]):
    """Its process is replaced when it dies or freezes, at most ``spec.max_restarts`` times without a whole episode in
    between; a death for which an episode has failed does not count."""

    # Called with the worker's name before it is restarted: waits for its node, and returns the options anew.
    renew: Callable[[str], Awaitable[Options]] | None = None

    def __init__(self, spec: EpisodeSpec, number: int, options: Options, start_seconds: float) -> None:
        self._spec, self._options = spec, options
        self._deaths = self.restarts = 0
        self._sent: list[Any] = []
        name = f"{spec.kind}-{number}"
        super().__init__(name, self._start(name), start_seconds)

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
        sent, self._sent = self._sent, []
        facts, requests, rollouts = self.actor.collect.options(concurrency_group=NEWS, num_returns=3).remote()
        news: EpisodeNews = await ask(self.name, facts, LONG_SECONDS, "collect")
        for reference in sent:
            await ask(self.name, reference, LONG_SECONDS, "episodes")
        if news.finished:
            self._deaths = 0
        return told(news, requests, rollouts, asyncio.get_running_loop().time())

    async def restart(self, error: ReplicaError, counts: bool = True) -> None:
        self._deaths += counts
        ray.kill(self.actor)
        self._sent.clear()
        if self._deaths > self._spec.max_restarts:
            raise WorkerLostError(f"{error} It is not started again (max_restarts).") from error
        self.restarts += 1
        try:
            self._options = await self.renew(self.name) if self.renew else self._options
            self.actor = self._start(self.name)
            await self.ready()
        except ReplicaError as failure:
            raise WorkerLostError(f"{failure} It had died before: {error}") from failure
