"""Builds the learner backend that ``learner.backend`` names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from asyncrlhf.learner.backend import BackendSpec, LearnerBackend
from asyncrlhf.learner.deepspeed_updater import DeepSpeedBackend
from asyncrlhf.learner.torch_backend import TorchBackend

BACKENDS: dict[str, Callable[..., LearnerBackend]] = {"torch": TorchBackend, "deepspeed": DeepSpeedBackend}


def build_learner(
    spec: BackendSpec,
    load_model: Callable[[], PreTrainedModel],
    *,
    rank: int = 0,
    ranks: int = 1,
    device: str | torch.device = "cpu",
) -> LearnerBackend:
    """One learner rank. ``load_model`` is called once, and once more for the reference when the algorithm needs one and
    the batches do not come with its log-probs."""
    model = load_model()
    reference = load_model() if spec.algorithm.needs_reference and not spec.reference_served else None
    return BACKENDS[spec.learner.backend](model, spec, reference=reference, rank=rank, ranks=ranks, device=device)
