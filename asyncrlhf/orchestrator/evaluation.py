"""Held-out evaluation on the generators: greedy answers to prompts that training never sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from asyncrlhf.cluster.handles import AnnotatorHandle, Runtime, WorkerLostError
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.annotate import annotate
from asyncrlhf.orchestrator.state import Replica
from asyncrlhf.types import Annotation, GenerationRequest, Prompt, Rollout, SamplingParams


class HeldOut:
    """Mean reward of the greedy answers; an accuracy where the reward is right or wrong.

    The prompts go to the live replicas as requests with negative ids, beside whatever they sample; the mean is over
    the answers that could be scored.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        runtime: Runtime,
    ) -> None:
        self._prompts = prompts
        self._sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        self._runtime = runtime
        self._next_id = -1

    async def accuracy(
        self, replicas: list[Replica], rewards: list[AnnotatorHandle], on_dead: Callable[[Replica, ReplicaError], None]
    ) -> float | None:
        """None without prompts, replicas or a single score. The share of a replica that dies goes to the living."""
        rollouts: list[Rollout] = []
        left = self._prompts
        while left and (able := [r for r in replicas if r.alive]):
            shares = [left[i :: len(able)] for i in range(len(able))]
            asked = [self._ask(r, share, on_dead) for r, share in zip(able, shares, strict=True) if share]
            answers = await asyncio.gather(*asked)
            rollouts += [rollout for found, _ in answers for rollout in found]
            left = [prompt for _, missed in answers for prompt in missed]
        results = await self._score(rollouts, rewards[0]) if rollouts else []
        scores = [r.reward for r in results if r.reward is not None]
        return sum(scores) / len(scores) if scores else None

    async def _ask(
        self, replica: Replica, prompts: list[Prompt], on_dead: Callable[[Replica, ReplicaError], None]
    ) -> tuple[list[Rollout], list[Prompt]]:
        """The answers, and the prompts to be asked again because the replica died."""
        try:
            return await replica.handle.generate(self._items(prompts)), []
        except ReplicaError as error:
            on_dead(replica, error)
            return [], prompts

    async def _score(self, rollouts: list[Rollout], worker: AnnotatorHandle) -> list[Annotation]:
        """One by one where the worker died of them together; one that it dies of alone has no score."""
        try:
            return await annotate(worker, self._runtime.store(rollouts))
        except WorkerLostError:
            raise
        except ReplicaError as error:
            if len(rollouts) == 1:
                return [Annotation(rollouts[0].rollout_id, None, error=str(error))]
        return [result for rollout in rollouts for result in await self._score([rollout], worker)]

    def _items(self, prompts: list[Prompt]) -> list[GenerationRequest]:
        items = []
        for prompt in prompts:
            items.append(GenerationRequest(self._next_id, self._next_id, prompt, 0, self._sampling))
            self._next_id -= 1
        return items
