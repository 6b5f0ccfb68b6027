"""Reward, reference and critic workers, which say something of finished rollouts, and the Ray actor around one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

from asyncrlhf.actors.messages import Address, ArrayBundle, Told, annotated, resolved
from asyncrlhf.actors.part import PartActor
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.data.pretrained import load_model, load_policy, load_tokenizer
from asyncrlhf.learner.companions import ServedCritic
from asyncrlhf.learner.forward import use_float32_head
from asyncrlhf.learner.learner_config import CriticConfig, ReferenceConfig
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.readahead.readers import ReadingModel, ReadingReference, read_ahead
from asyncrlhf.records.spans import Lane, SpanBatch
from asyncrlhf.rewards.build_scorer import build_scorer
from asyncrlhf.rewards.reward import Scorer
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import Annotation, Rollout

ANSWER_SECONDS = 450.0  # what the default of stall_timeout_seconds gives


class AnnotatorWorker(Protocol):
    """Says something of finished rollouts: rewards, reference log-probs or values."""

    def annotate(
        self, rollouts: Sequence[Rollout], ticket: Ticket | None = None
    ) -> tuple[list[Annotation], ArrayBundle | None]:
        """One annotation a rollout, in order, and the bundle that its arrays lie in, where it computes any.

        ``ticket``: of the weights that are to answer, for a worker whose weights change (the critic).
        """
        ...

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget the rollouts ``released``, then read ``chunks`` of others ahead of their end."""
        ...


class AnnotatorSpec(Protocol):
    """Everything a worker needs to start on any machine. ``answer_seconds``: how long one call of it may take."""

    kind: ClassVar[str]  # reward, reference or critic: the name of its settings, too

    @property
    def settings(self) -> RewardConfig | ReferenceConfig | CriticConfig: ...

    @property
    def answer_seconds(self) -> float: ...

    def build(self, name: str) -> AnnotatorWorker: ...


@dataclass(frozen=True)
class RewardSpec:
    settings: RewardConfig
    task: TaskConfig
    model: ModelConfig
    max_completion_length: int
    cache_tokens: int = 0  # of each reward model, for chunks (fusion.granularity=chunk); 0: it scores whole rollouts
    answer_seconds: float = ANSWER_SECONDS

    kind: ClassVar[str] = "reward"

    def build(self, name: str = "") -> RewardWorker:
        tokenizer = load_tokenizer(self.model)
        task = partial(build_task, self.task, tokenizer)
        scorer = build_scorer(self.settings, tokenizer, task, self.max_completion_length)
        return RewardWorker(scorer, read_ahead(scorer, self.cache_tokens, self.settings.max_batch_tokens))


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


@dataclass(frozen=True)
class ReferenceSpec:
    """``precision``: ``learner.mixed_precision``, which
    goes with ``float32_head``, the learner's."""

    settings: ReferenceConfig
    model: ModelConfig
    temperature: float
    precision: str
    float32_head: bool = False
    cache_tokens: int = 0  # for chunks (fusion.granularity=chunk); 0: it reads whole rollouts
    answer_seconds: float = ANSWER_SECONDS

    kind: ClassVar[str] = "reference"

    def build(self, name: str) -> ReferenceWorker:
        return ReferenceWorker(self)

    @property
    def fingerprint(self) -> dict[str, str | float]:
        """What decides over the log-probs: others than a checkpoint's are computed anew when a run goes on."""
        dtype = self.precision + ", float32 head" * self.float32_head
        dtype = dtype if self.settings.dtype == "auto" else self.settings.dtype
        return {"model": self.model.path, "temperature": self.temperature, "dtype": dtype}


class ReferenceWorker(ReadingReference):
    """The frozen start model, never a resumed policy, and without the adapter of a LoRA run, which begins as the model
    itself."""

    def __init__(self, spec: ReferenceSpec) -> None:
        own = spec.settings
        device = "cuda" if own.gpus > 0 else "cpu"
        dtype = torch.float32 if own.dtype == "auto" else getattr(torch, own.dtype)
        model = load_model(spec.model, device, dtype=dtype)
        if spec.float32_head and own.dtype == "auto":
            use_float32_head(model)
        super().__init__(
            model,
            temperature=spec.temperature,
            precision=spec.precision if own.dtype == "auto" else "none",
            token_budget=own.token_budget,
            cache_tokens=spec.cache_tokens,
        )

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], ArrayBundle]:
        """The reference log-probs [L] of each rollout, or the reason why it has none."""
        return annotated("ref_logprobs", rollouts, self.answer(rollouts))


@dataclass(frozen=True)
class CriticSpec:
    """``precision``: ``learner.mixed_precision``."""

    settings: CriticConfig
    model: ModelConfig
    precision: str
    runtime: str
    weights: WeightsConfig
    answer_seconds: float = ANSWER_SECONDS

    kind: ClassVar[str] = "critic"

    def build(self, name: str) -> CriticWorker:
        return CriticWorker(self, name)


class CriticWorker:
    """A copy of the learner's critic. Each call brings the ticket of the version that is to answer it, so that versions
    change between two calls and a worker that was started again lacks nothing."""

    def __init__(self, spec: CriticSpec, name: str) -> None:
        own = spec.settings
        device = "cuda" if own.gpus > 0 else "cpu"
        self._critic = ServedCritic(
            load_policy(spec.model, device, dtype=torch.float32),
            precision=spec.precision,
            token_budget=own.token_budget,
        )
        self._receiver = build_receiver(spec.weights.beside_the_policy(spec.runtime), spec.runtime, device)
        self._receiver.connect("", 1, 2, 0, name)

    def annotate(
        self, rollouts: Sequence[Rollout], ticket: Ticket | None = None
    ) -> tuple[list[Annotation], ArrayBundle]:
        """The values [L] of each rollout by the critic behind ``ticket``, or the reason why it has none.

        Raises WeightSyncError when the version cannot be had: the learner that holds it is gone.
        """
        assert ticket is not None, "a critic is asked by version"
        if self._critic.version != ticket.version:
            self._critic.load(ticket.version, self._receiver.receive(ticket))
        return annotated("values", rollouts, self._critic.answer(rollouts), ticket.version)

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Nothing is read ahead: the critic that will answer is not known before a rollout ends."""
        return Prefilled(False)


def build_annotator(spec: AnnotatorSpec, name: str) -> AnnotatorWorker:
    return spec.build(name)


class AnnotatorActor(PartActor):
    """Builds the worker in its own process. Rollouts and chunks arrive in bundles, resolved from the object store."""

    def __init__(self, spec: AnnotatorSpec, name: str) -> None:
        if spec.settings.threads:
            torch.set_num_threads(spec.settings.threads)
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
