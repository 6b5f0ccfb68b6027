"""A reward worker: the parts of the reward, applied to finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from asyncrlhf.actors.annotator import ANSWER_SECONDS
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.data.pretrained import load_tokenizer
from asyncrlhf.readahead.messages import Chunk, Prefilled
from asyncrlhf.readahead.reward import ReadingScorer
from asyncrlhf.rewards.build_scorer import build_scorer
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.types import Annotation, Rollout


@dataclass(frozen=True)
class RewardSpec:
    """Everything a reward worker needs to start on any machine."""

    reward: RewardConfig
    task: TaskConfig
    model: ModelConfig
    max_completion_length: int
    cache_tokens: int = 0  # of each reward model, for chunks (fusion.granularity=chunk); 0: it scores whole rollouts
    answer_seconds: float = ANSWER_SECONDS

    kind: ClassVar[str] = "reward"

    @property
    def settings(self) -> RewardConfig:
        return self.reward

    def build(self, name: str) -> RewardWorker:
        return RewardWorker(build_reward(self))


def build_reward(spec: RewardSpec) -> ReadingScorer:
    tokenizer = load_tokenizer(spec.model)
    task = partial(build_task, spec.task, tokenizer)
    scorer = build_scorer(spec.reward, tokenizer, task, spec.max_completion_length)
    return ReadingScorer(scorer, spec.cache_tokens, spec.reward.max_batch_tokens)


class RewardWorker:
    """One scorer: it computes no arrays."""

    def __init__(self, scorer: ReadingScorer) -> None:
        self.scorer = scorer

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], None]:
        """One reward a rollout, in order, or the reason why it has none."""
        return self.scorer.score(rollouts), None

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read ``chunks`` ahead."""
        return self.scorer.prefill(released, chunks)
