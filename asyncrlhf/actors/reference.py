"""A reference worker: the frozen start model, which gives finished rollouts their reference log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from asyncrlhf.actors.annotator import ANSWER_SECONDS
from asyncrlhf.actors.messages import ArrayBundle, annotated
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_model
from asyncrlhf.learner.forward import use_float32_head
from asyncrlhf.learner.learner_config import ReferenceConfig
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.readahead.readers import ReadingReference
from asyncrlhf.types import Annotation, Rollout


@dataclass(frozen=True)
class ReferenceSpec:
    """Everything a reference worker needs to start on any machine. ``precision``: ``learner.mixed_precision``, which
    goes with ``float32_head``, the learner's."""

    reference: ReferenceConfig
    model: ModelConfig
    temperature: float
    precision: str
    float32_head: bool = False
    cache_tokens: int = 0  # for chunks (fusion.granularity=chunk); 0: it reads whole rollouts
    answer_seconds: float = ANSWER_SECONDS

    kind: ClassVar[str] = "reference"

    @property
    def settings(self) -> ReferenceConfig:
        return self.reference

    def build(self, name: str) -> ReferenceWorker:
        return ReferenceWorker(self)

    @property
    def fingerprint(self) -> dict[str, str | float]:
        """What decides over the log-probs: others than a checkpoint's are computed anew when a run goes on."""
        dtype = self.precision + ", float32 head" * self.float32_head
        dtype = dtype if self.reference.dtype == "auto" else self.reference.dtype
        return {"model": self.model.path, "temperature": self.temperature, "dtype": dtype}


class ReferenceWorker:
    """The start model, never a resumed policy, and without the adapter of a LoRA run, which begins as the model
    itself."""

    def __init__(self, spec: ReferenceSpec) -> None:
        own = spec.reference
        device = "cuda" if own.gpus > 0 else "cpu"
        dtype = torch.float32 if own.dtype == "auto" else getattr(torch, own.dtype)
        model = load_model(spec.model, device, dtype=dtype)
        if spec.float32_head and own.dtype == "auto":
            use_float32_head(model)
        self._policy = ReadingReference(
            model,
            temperature=spec.temperature,
            precision=spec.precision if own.dtype == "auto" else "none",
            token_budget=own.token_budget,
            cache_tokens=spec.cache_tokens,
        )

    def annotate(self, rollouts: Sequence[Rollout], ticket: Any = None) -> tuple[list[Annotation], ArrayBundle]:
        """The reference log-probs [L] of each rollout, or the reason why it has none."""
        return annotated("ref_logprobs", rollouts, self._policy.answer(rollouts))

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read ``chunks`` ahead."""
        return self._policy.prefill(released, chunks)
