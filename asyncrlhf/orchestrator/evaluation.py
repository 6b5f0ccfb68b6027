"""Held-out evaluation on the generators: greedy answers to prompts that training never sees."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from asyncrlhf.actors.messages import WorkItem
from asyncrlhf.orchestrator.handles import RewardHandle, Runtime
from asyncrlhf.orchestrator.state import Replica
from asyncrlhf.types import GenerationRequest, Prompt, RewardResult, Rollout, SamplingParams


class HeldOut:
    """Mean reward of the greedy answers; an accuracy where the reward is right or wrong.

    The prompts go to the live replicas as requests with negative ids, beside whatever they sample; the mean is over
    the answers that could be scored.
    """

    def __init__(self, prompts: list[Prompt], sampling: SamplingParams, runtime: Runtime) -> None:
        self._prompts = prompts
        self._sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        self._runtime = runtime
        self._next_id = -1

    async def accuracy(self, replicas: list[Replica], rewards: list[RewardHandle]) -> float | None:
        """None without prompts, replicas or a single score."""
        able = [r for r in replicas if r.alive]
        if not able or not self._prompts:
            return None
        shares = [self._prompts[i :: len(able)] for i in range(len(able))]
        work = [(r, self._items(share)) for r, share in zip(able, shares, strict=True) if share]
        answers = await asyncio.gather(*(r.handle.generate(items) for r, items in work))
        rollouts = [rollout for share in answers for rollout in share]
        results = await self._score(rollouts, rewards[0])
        scores = [r.reward for r in results if r.reward is not None]
        return sum(scores) / len(scores) if scores else None

    async def _score(self, rollouts: list[Rollout], worker: RewardHandle) -> list[RewardResult]:
        return await worker.score(self._runtime.store(rollouts))

    def _items(self, prompts: list[Prompt]) -> list[WorkItem]:
        items = []
        for prompt in prompts:
            request = GenerationRequest(self._next_id, self._next_id, prompt.token_ids, 0, self._sampling)
            items.append(WorkItem(request, prompt))
            self._next_id -= 1
        return items
