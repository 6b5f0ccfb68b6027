"""Optimizer, learning-rate schedule and the guarded update of one set of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from asyncrlhf.learner.config import LearnerConfig


def schedule_factor(config: LearnerConfig, step: int, steps: int) -> float:
    """The share of the learning rate at learner step ``step`` (from 0) of ``steps``: linear warm-up, then the schedule.

    ``linear`` and ``cosine`` would reach 0 one step after the last. A run that goes on beyond ``steps`` stays at the
    rate of its last step.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    span = max(steps - warmup, 1)
    progress = min(step - warmup, span - 1) / span
    if config.lr_schedule == "linear":
        return 1.0 - progress
    if config.lr_schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def build_optimizer(config: LearnerConfig, policy: nn.Module, critic: nn.Module | None) -> torch.optim.AdamW:
    """Fused AdamW over float32 weights; norms and biases do not decay. Each group keeps its rate as ``base_lr``."""
    groups = _groups(policy, config.learning_rate, config.weight_decay)
    if critic is not None:
        rate = config.critic_learning_rate or config.learning_rate
        groups += _groups(critic, rate, config.weight_decay)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Scale every group's base rate by ``factor``; returns the policy's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """The gradient's norm before clipping, 0-dim; ``max_norm`` 0 only measures."""
    return nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)


def _groups(module: nn.Module, rate: float, decay: float) -> list[dict]:
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = ((decay, [p for p in trained if p.ndim >= 2]), (0.0, [p for p in trained if p.ndim < 2]))
    return [{"params": part, "weight_decay": d, "lr": rate, "base_lr": rate} for d, part in parts if part]
