"""Builds the learner backend that ``learner.backend`` names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.backend import LearnerBackend
from asyncrlhf.learner.deepspeed_updater import DeepSpeedBackend
from asyncrlhf.learner.learner_config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend

BACKENDS: dict[str, Callable[..., LearnerBackend]] = {"torch": TorchBackend, "deepspeed": DeepSpeedBackend}


def build_learner(
    config: LearnerConfig,
    algorithm: AlgorithmConfig,
    load_model: Callable[[], PreTrainedModel],
    *,
    steps: int,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    reference_served: bool = False,
    critic_served: bool = False,
    rank: int = 0,
    ranks: int = 1,
    device: str | torch.device = "cpu",
) -> LearnerBackend:
    """One learner rank. ``load_model`` is called once, and once more for the reference when the algorithm needs one and
    the batches do not come with its log-probs (``reference_served``). ``critic_served``: they come with values."""
    return BACKENDS[config.backend](
        load_model(),
        config,
        algorithm,
        steps=steps,
        reference=load_model() if algorithm.needs_reference and not reference_served else None,
        reference_served=reference_served,
        critic_served=critic_served,
        temperature=temperature,
        max_completion_length=max_completion_length,
        rank=rank,
        ranks=ranks,
        device=device,
    )
