"""A reward worker: the parts of the reward, applied to finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from asyncrlhf.actors.annotator import ANSWER_SECONDS
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.data.pretrained import load_tokenizer
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.readahead.readers import ReadingModel, read_ahead
from asyncrlhf.rewards.build_scorer import build_scorer
from asyncrlhf.rewards.reward import Scorer
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
        scorer = build_reward(self)
        return RewardWorker(scorer, read_ahead(scorer, self.cache_tokens, self.reward.max_batch_tokens))


def build_reward(spec: RewardSpec) -> Scorer:
    tokenizer = load_tokenizer(spec.model)
    task = partial(build_task, spec.task, tokenizer)
    return build_scorer(spec.reward, tokenizer, task, spec.max_completion_length)


class RewardWorker:
    """One scorer, of whose models ``readers`` read ahead: it computes no arrays."""

    def __init__(self, scorer: Scorer, readers: Sequence[ReadingModel] = ()) -> None:
        self.scorer = scorer
        self.readers = readers

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], None]:
        """One reward a rollout, in order, or the reason why it has none. What is scored, or failed by any part, is
        forgotten."""
        results = self.scorer.score(rollouts)
        for reader in self.readers:
            reader.release(rollout.rollout_id for rollout in rollouts)
        return results, None

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then let the models that can read ``chunks`` ahead."""
        answers = [reader.prefill(released, chunks) for reader in self.readers]
        return Prefilled(bool(answers), sorted({i for answer in answers for i in answer.evicted}))
