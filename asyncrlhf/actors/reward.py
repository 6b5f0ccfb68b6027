"""A reward worker: the parts of the reward, applied to finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrlhf.actors.where import Where, where
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.data.pretrained import load_tokenizer
from asyncrlhf.readahead.messages import Chunk, Prefilled
from asyncrlhf.readahead.reward import ReadingScorer
from asyncrlhf.rewards.build_scorer import build_scorer
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.types import RewardResult, Rollout


@dataclass(frozen=True)
class RewardSpec:
    """Everything a reward worker needs to start on any machine."""

    reward: RewardConfig
    task: TaskConfig
    model: ModelConfig
    max_completion_length: int
    cache_tokens: int = 0  # of each reward model, for chunks (fusion.granularity=chunk); 0: it scores whole rollouts


def build_reward(spec: RewardSpec) -> ReadingScorer:
    tokenizer = load_tokenizer(spec.model)
    scorer = build_scorer(spec.reward, tokenizer, lambda: build_task(spec.task, tokenizer), spec.max_completion_length)
    return ReadingScorer(scorer, spec.cache_tokens, spec.reward.max_batch_tokens)


class RewardActor:
    """The Ray actor around one scorer."""

    def __init__(self, spec: RewardSpec) -> None:
        if spec.reward.threads:
            torch.set_num_threads(spec.reward.threads)
        self._scorer = build_reward(spec)

    def ready(self) -> bool:
        return True

    def where(self) -> Where:
        return where()

    def score(self, indices: Sequence[tuple[int, int]], *bundles: Sequence[Rollout]) -> list[RewardResult]:
        """``indices``: (bundle, index) of each rollout; the bundles arrive resolved from the object store."""
        return self._scorer.score([bundles[bundle][index] for bundle, index in indices])

    def prefill(
        self, released: Sequence[int], indices: Sequence[tuple[int, int]], *bundles: Sequence[Chunk]
    ) -> Prefilled:
        """Forget ``released``, then read the chunks (bundle, index) ahead."""
        return self._scorer.prefill(released, [bundles[bundle][index] for bundle, index in indices])
