"""Optimizer, learning-rate schedule, and what all that applies gradients has in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.data.adapter import trained_tensors
from asyncrlhf.learner.distributed import padded
from asyncrlhf.learner.learner_config import LearnerConfig
from asyncrlhf.learner.plan import Microbatch
from asyncrlhf.learner.shards import Shards, on_host, whole


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


def build_optimizer(config: LearnerConfig, policy: nn.Module | None, critic: nn.Module | None) -> torch.optim.AdamW:
    """Fused AdamW over float32 weights; norms and biases do not decay. Each group keeps its rate as ``base_lr``."""
    groups = []
    if policy is not None:
        groups += _groups(policy, config.learning_rate, config.weight_decay)
    if critic is not None:
        rate = config.critic_learning_rate or config.learning_rate
        groups += _groups(critic, rate, config.weight_decay)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


class Updater(ABC):
    """How policy and critic lie on the ranks, and how a gradient becomes an update there.

    ``policy`` and ``critic`` are what forward passes call. All ranks call each method together.
    """

    policy: Any
    critic: Any = None
    optimizers: Sequence[torch.optim.Optimizer]  # the policy's first

    def __init__(self, config: LearnerConfig, model: PreTrainedModel, device: torch.device, ranks: int) -> None:
        self.config, self.model, self.device, self.ranks = config, model, device, ranks
        self._callbacks: list[Callable[[], object]] = []

    @property
    def shards(self) -> Shards | None:
        """The policy's tensors where no rank holds them whole; None where each does."""
        return None

    def frozen(self, module: nn.Module) -> Any:
        """A module that is never updated, laid out over the ranks as the policy is."""
        return module

    def looks(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch | None]:
        """The passes without gradient that this rank makes for ``microbatches``; None is one over dummy data."""
        return padded(microbatches, self.device, self.ranks) if self.config.sharded else microbatches

    @abstractmethod
    def trains(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        """The passes with gradient of one update; each must end in :meth:`backward` before the next is asked for."""

    @abstractmethod
    def begin(self) -> None:
        """Forget the gradients of the update before."""

    @abstractmethod
    def backward(self, module: Any, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss`` [0-dim], which is one term of a sum over microbatches and ranks."""

    @abstractmethod
    def apply(self) -> float:
        """Clip and apply the gradient; the policy's norm, or NaN when it was not finite on any rank and was dropped."""

    def set_rate(self, factor: float) -> float:
        """Scale every group's base rate by ``factor``; returns the policy's rate."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["base_lr"] * factor
        return float(self.optimizers[0].param_groups[0]["lr"])

    def before_update(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called each time before the parameters change: a snapshot may still be read from them."""
        self._callbacks.append(callback)

    def _settle(self) -> None:
        for callback in self._callbacks:
            callback()

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The policy's tensors by name, for publishing (tied tensors once, under their first name).

        With ``shards``: copies of all of them in rank 0's host memory, empty elsewhere.
        """
        if self.shards is None:
            return trained_tensors(self.model)
        return on_host(self.shards, torch.distributed.get_rank())

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Any], rank: int) -> None:
        """Write model and optimizer, and ``state`` as ``checkpoint.write`` does; it must tell if there is a critic."""

    @abstractmethod
    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when what :meth:`save` wrote does not fit."""


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """The gradient's norm over all its shards before clipping, 0-dim; ``max_norm`` 0 only measures."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None]))
    nn.utils.clip_grads_with_norm_(trained, max_norm or math.inf, norm)
    return norm


def _groups(module: nn.Module, rate: float, decay: float) -> list[dict]:
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = ((decay, [p for p in trained if p.ndim >= 2]), (0.0, [p for p in trained if p.ndim < 2]))
    return [{"params": part, "weight_decay": d, "lr": rate, "base_lr": rate} for d, part in parts if part]
