"""Optimizer, learning-rate schedule and the guarded update of one set of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from asyncrlhf.learner.config import LearnerConfig
from asyncrlhf.learner.distributed import all_sum


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


class Updater:
    """The optimizer of one rank: scaled backward passes, and updates that all ranks make or skip together."""

    def __init__(
        self, config: LearnerConfig, policy: nn.Module, critic: nn.Module | None, device: torch.device, ranks: int
    ) -> None:
        self._config, self._ranks = config, ranks
        self._modules = [policy] if critic is None else [policy, critic]
        self.optimizer = build_optimizer(config, policy, critic)
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.mixed_precision == "float16")

    def before_update(self, callback: Callable[[], object]) -> None:
        def hook(*_: object) -> None:
            callback()

        self.optimizer.register_step_pre_hook(hook)

    def backward(self, loss: torch.Tensor) -> None:
        """Data-parallel wrappers average over ranks; the loss is meant as a sum, hence times the ranks."""
        self._scaler.scale(loss * self._ranks).backward()

    def apply(self) -> float:
        """Clip and apply the gradient; the policy's norm, or NaN when any rank found a gradient that is not finite."""
        self._scaler.unscale_(self.optimizer)
        norms = [clip_gradient(module.parameters(), self._config.max_grad_norm) for module in self._modules]
        broken = sum((~torch.isfinite(norm)).float() for norm in norms)
        skip = bool(all_sum(torch.as_tensor(broken), self._ranks))
        if not skip:
            self._scaler.step(self.optimizer)
        self._scaler.update()
        return math.nan if skip else float(norms[0])

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """The gradient's norm before clipping, 0-dim; ``max_norm`` 0 only measures."""
    return nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)


def _groups(module: nn.Module, rate: float, decay: float) -> list[dict]:
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = ((decay, [p for p in trained if p.ndim >= 2]), (0.0, [p for p in trained if p.ndim < 2]))
    return [{"params": part, "weight_decay": d, "lr": rate, "base_lr": rate} for d, part in parts if part]
