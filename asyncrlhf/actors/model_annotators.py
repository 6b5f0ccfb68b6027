"""The annotators that hold a model: the reference worker and the critic worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from asyncrlhf.actors.annotator import ANSWER_SECONDS
from asyncrlhf.actors.messages import ArrayBundle, annotated
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.learner.deterministic import deterministic
from asyncrlhf.learner.model.forward import use_float32_head
from asyncrlhf.learner.settings.learner_config import CriticConfig, ReferenceConfig
from asyncrlhf.learner.step.companions import ServedCritic
from asyncrlhf.models.pretrained import load_policy
from asyncrlhf.models.teacher import load_reference
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.readahead.readers import ReadingReference
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import Annotation, Rollout


@dataclass(frozen=True)
class ReferenceSpec:
    """``policy``: the checkpoint that trains; ``model``: the reference's own, or the same. ``precision``:
    ``learner.mixed_precision``, which goes with ``float32_head`` and ``deterministic``, the learner's."""

    settings: ReferenceConfig
    policy: ModelConfig
    model: ModelConfig
    temperature: float
    precision: str
    float32_head: bool = False
    cache_tokens: int = 0  # for chunks (fusion.granularity=chunk); 0: it reads whole rollouts
    answer_seconds: float = ANSWER_SECONDS
    max_restarts: int = 0
    deterministic: bool = False

    kind: ClassVar[str] = "reference"

    def build(self, name: str) -> ReferenceWorker:
        return ReferenceWorker(self)

    @property
    def fingerprint(self) -> dict[str, str | float]:
        """The settings that determine the log-probs: if they differ, a resumed run recomputes them."""
        dtype = self.precision + ", float32 head" * self.float32_head
        dtype = dtype if self.settings.dtype == "auto" else self.settings.dtype
        return {"model": self.model.path, "temperature": self.temperature, "dtype": dtype}


class ReferenceWorker(ReadingReference):
    """The frozen initial model, or another checkpoint: never a resumed policy, and without a LoRA adapter."""

    def __init__(self, spec: ReferenceSpec) -> None:
        own = spec.settings
        device = "cuda" if own.gpus > 0 else "cpu"
        dtype = torch.float32 if own.dtype == "auto" else getattr(torch, own.dtype)
        model = load_reference(spec.policy, spec.model, device, dtype)
        if spec.float32_head and own.dtype == "auto":
            use_float32_head(model)
        self._deterministic = partial(deterministic, spec.deterministic)
        super().__init__(
            model,
            temperature=spec.temperature,
            precision=spec.precision if own.dtype == "auto" else "none",
            token_budget=own.token_budget,
            cache_tokens=spec.cache_tokens,
        )

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], ArrayBundle]:
        """The reference log-probs [L] of each rollout, or the reason for a missing one."""
        with self._deterministic():
            return annotated("ref_logprobs", rollouts, self.answer(rollouts))

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        with self._deterministic():
            return super().prefill(released, chunks)


@dataclass(frozen=True)
class CriticSpec:
    """``precision``: ``learner.mixed_precision``; ``deterministic``: the learner's."""

    settings: CriticConfig
    model: ModelConfig
    precision: str
    runtime: str
    weights: WeightsConfig
    answer_seconds: float = ANSWER_SECONDS
    max_restarts: int = 0
    deterministic: bool = False

    kind: ClassVar[str] = "critic"

    def build(self, name: str) -> CriticWorker:
        return CriticWorker(self, name)


class CriticWorker:
    """A copy of the learner's critic. Each call carries the ticket of the version to use, so that versions change only
    between calls and a restarted worker needs no other state."""

    def __init__(self, spec: CriticSpec, name: str) -> None:
        own = spec.settings
        self._deterministic = partial(deterministic, spec.deterministic)
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
        """The values [L] of each rollout by the critic of ``ticket``, or the reason why it has none.

        Raises WeightSyncError if the version is not available: the learner that held it is lost.
        """
        assert ticket is not None, "a critic is asked by version"
        if self._critic.version != ticket.version:
            self._critic.load(ticket.version, self._receiver.receive(ticket))
        with self._deterministic():
            return annotated("values", rollouts, self._critic.answer(rollouts), ticket.version)

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Does nothing: the critic version that will score a rollout is not known before its end."""
        return Prefilled(False)
