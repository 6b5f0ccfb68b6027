"""Annotators of finished rollouts: the protocol of their workers, the Ray actor around one, the reward worker.

The workers that hold a model are in :mod:`asyncrlhf.actors.model_annotators`, so that rewards by rule need no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from asyncrlhf.actors.messages import Address, ArrayBundle, Told, resolved
from asyncrlhf.actors.part import PartActor
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.records.write.spans import Lane, SpanBatch
from asyncrlhf.rewards.build_scorer import build_scorer
from asyncrlhf.rewards.reward import Scorer
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import Annotation, Rollout

if TYPE_CHECKING:
    from asyncrlhf.learner.settings.learner_config import CriticConfig, ReferenceConfig
    from asyncrlhf.readahead.readers import ReadingModel

ANSWER_SECONDS = 3000.0  # with the default of stall_timeout_seconds


class AnnotatorWorker(Protocol):
    """Computes annotations of finished rollouts: rewards, reference log-probs or values."""

    def annotate(
        self, rollouts: Sequence[Rollout], ticket: Ticket | None = None
    ) -> tuple[list[Annotation], ArrayBundle | None]:
        """One annotation per rollout, in order, and the bundle with its arrays, if it computes any.

        ``ticket``: of the weights to use, for a worker whose weights change (the critic).
        """
        ...

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget the rollouts ``released``, then read ``chunks`` of unfinished rollouts ahead."""
        ...


class AnnotatorSpec(Protocol):
    """Everything that a worker needs to start on any machine. ``answer_seconds``: the deadline of one call to it;
    ``max_restarts``: deaths in a row after which it is not started again."""

    kind: ClassVar[str]  # reward, reference or critic: also the name of its settings

    @property
    def settings(self) -> RewardConfig | ReferenceConfig | CriticConfig: ...

    @property
    def answer_seconds(self) -> float: ...

    @property
    def max_restarts(self) -> int: ...

    def build(self, name: str) -> AnnotatorWorker: ...


@dataclass(frozen=True)
class RewardSpec:
    settings: RewardConfig
    task: TaskConfig
    model: ModelConfig
    max_completion_length: int
    cache_tokens: int = 0  # of each reward model, for chunks (fusion.granularity=chunk); 0: it scores whole rollouts
    answer_seconds: float = ANSWER_SECONDS
    max_restarts: int = 0

    kind: ClassVar[str] = "reward"

    def build(self, name: str = "") -> RewardWorker:
        tokenizer = load_tokenizer(self.model)
        task = partial(build_task, self.task, tokenizer)
        scorer = build_scorer(self.settings, tokenizer, task, self.max_completion_length)
        if not self.cache_tokens:
            return RewardWorker(scorer)
        from asyncrlhf.readahead.readers import read_ahead

        return RewardWorker(scorer, read_ahead(scorer, self.cache_tokens, self.settings.max_batch_tokens))


class RewardWorker:
    """One scorer, whose models ``readers`` read ahead; it computes no arrays."""

    def __init__(self, scorer: Scorer, readers: Sequence[ReadingModel] = ()) -> None:
        self.scorer = scorer
        self.readers = readers

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], None]:
        """One reward per rollout, in order, or the reason for a missing one. Answered rollouts are forgotten."""
        results = self.scorer.score(rollouts)
        for reader in self.readers:
            reader.release(rollout.rollout_id for rollout in rollouts)
        return results, None

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then let the models that can read ``chunks`` ahead do so."""
        answers = [reader.prefill(released, chunks) for reader in self.readers]
        return Prefilled(bool(answers), sorted({i for answer in answers for i in answer.evicted}))

    def close(self) -> None:
        """End the processes of reward functions, and remove their folders."""
        self.scorer.close()


def build_annotator(spec: AnnotatorSpec, name: str) -> AnnotatorWorker:
    return spec.build(name)


def limit_threads(threads: int) -> None:
    """Limit the threads of torch's kernels, whether torch is imported already or later, by a user's reward function."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


class AnnotatorActor(PartActor):
    """Builds the worker in its own process. Rollouts and chunks arrive in bundles, resolved from the object store."""

    def __init__(self, spec: AnnotatorSpec, name: str) -> None:
        if spec.settings.threads:
            limit_threads(spec.settings.threads)
        self._lane = Lane(name)
        with self._lane.during("load"):
            self._worker: AnnotatorWorker = spec.build(name)

    def annotate(
        self, addresses: Sequence[Address], ticket: Ticket | None, *bundles: Any
    ) -> tuple[Told[list[Annotation]], ArrayBundle | None]:
        asked, rollouts = time.monotonic(), resolved(addresses, bundles)
        size = len(rollouts), sum(len(r.response_ids) for r in rollouts)
        with self._lane.during("score", None if ticket is None else ticket.version, *size):
            annotations, arrays = self._worker.annotate(rollouts, ticket)
        return Told(annotations, [self._lane.take(asked)]), arrays

    def prefill(self, released: Sequence[int], addresses: Sequence[Address], *bundles: Any) -> Prefilled:
        chunks = resolved(addresses, bundles)
        with self._lane.during("score", None, 0, sum(len(chunk.token_ids) for chunk in chunks)):
            return self._worker.prefill(released, chunks)

    def close(self) -> list[SpanBatch]:
        return [*super().close(), self._lane.take()]
