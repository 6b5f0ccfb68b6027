"""A reference worker: the frozen start model, which gives finished rollouts their reference log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrlhf.actors.messages import RolloutBundle, bundled
from asyncrlhf.actors.where import Where, where
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_model
from asyncrlhf.learner.forward import use_float32_head
from asyncrlhf.learner.learner_config import ReferenceConfig
from asyncrlhf.readahead.messages import Chunk, Prefilled
from asyncrlhf.readahead.reference import ReadingReference
from asyncrlhf.types import Rollout, ServiceResult


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

    @property
    def fingerprint(self) -> dict[str, str | float]:
        """What decides over the log-probs: others than a checkpoint's are computed anew when a run goes on."""
        dtype = self.precision + ", float32 head" * self.float32_head
        dtype = dtype if self.reference.dtype == "auto" else self.reference.dtype
        return {"model": self.model.path, "temperature": self.temperature, "dtype": dtype}


class ReferenceWorker:
    """The start model, never a resumed policy, and without the adapter of a LoRA run, which begins as the model itself.

    Each answer lies in a bundle of its own, beside the rollout's other arrays, so that whoever reads the rollout later
    needs one reference and not two.
    """

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

    def complete(self, rollouts: Sequence[Rollout]) -> tuple[list[ServiceResult], RolloutBundle]:
        """One result a rollout, in order; the payload of those that succeeded is an index into the bundle."""
        return bundled(rollouts, self._policy.answer(rollouts))

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Forget ``released``, then read ``chunks`` ahead."""
        return self._policy.prefill(released, chunks)


class ReferenceActor:
    """The Ray actor around one worker."""

    def __init__(self, spec: ReferenceSpec) -> None:
        torch.set_num_threads(spec.reference.threads)
        self._worker = ReferenceWorker(spec)

    def ready(self) -> bool:
        return True

    def where(self) -> Where:
        return where()

    def complete(
        self, indices: Sequence[tuple[int, int]], *bundles: Sequence[Rollout]
    ) -> tuple[list[ServiceResult], RolloutBundle]:
        """``indices``: (bundle, index) of each rollout; the bundles arrive resolved from the object store."""
        return self._worker.complete([bundles[bundle][index] for bundle, index in indices])

    def prefill(
        self, released: Sequence[int], indices: Sequence[tuple[int, int]], *bundles: Sequence[Chunk]
    ) -> Prefilled:
        """Forget ``released``, then read the chunks (bundle, index) ahead."""
        return self._worker.prefill(released, [bundles[bundle][index] for bundle, index in indices])
