"""Optimizers by name: AdamW, Muon beside AdamW, 8-bit AdamW, and the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.plugins import guarded, load_function
from asyncrlhf.validation import check, check_package

MUON = "muon"  # the optimizer's name; in a group, whether its parameters are Muon's


class MuonAdamW:
    """torch's Muon for matrices and AdamW for the rest, under the interface of one optimizer."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], **muon: Any) -> None:
        matrices = [group for group in groups if group[MUON]]
        rest = [group for group in groups if not group[MUON]]
        # Steps of the size that AdamW's have, so that one learning rate serves both (Liu et al., 2502.16982).
        muon = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, **muon}
        parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=lr, **muon)] if matrices else []
        self.parts = [*parts, *([torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True)] if rest else [])]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)


def build_optimizer(config: LearnerConfig, policy: nn.Module | None, critic: nn.Module | None) -> Any:
    """``learner.optim`` over float32 weights; norms and biases do not decay. Each group keeps its rate as ``base_lr``.
    Raises ConfigError for an optimizer that cannot be built."""
    groups = []
    if policy is not None:
        groups += _groups(policy, config.learning_rate, config.weight_decay, config.optim == MUON)
    if critic is not None:
        rate = config.critic_learning_rate or config.learning_rate
        groups += _groups(critic, rate, config.weight_decay, config.optim == MUON)
    betas, given = (config.adam_beta1, config.adam_beta2), dict(config.optim_args or {})
    what = f"learner.optim={config.optim} with learner.optim_args={given} cannot be built"
    optimizer = guarded(what, lambda: _build(config, groups, betas, given))
    check(
        hasattr(optimizer, "param_groups"),
        f"learner.optim={config.optim} gives {type(optimizer).__name__}; allowed: a class or a function that gives an "
        "optimizer of torch's interface.",
    )
    for group in optimizer.param_groups:
        group.setdefault("base_lr", group["lr"])
    return optimizer


def check_optimizer(config: LearnerConfig) -> None:
    """Raise ConfigError for an unknown optimizer, before any actor starts."""
    if config.optim == "adamw_8bit":
        check_package("learner.optim=adamw_8bit", "bitsandbytes", "bitsandbytes")
    if config.optim != "adamw_8bit":  # which needs a GPU
        build_optimizer(config, nn.Linear(2, 2), None)


def _build(config: LearnerConfig, groups: list[dict[str, Any]], betas: tuple[float, float], given: Any) -> Any:
    rate = config.learning_rate
    if config.optim == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, **{"fused": True, **given})
    if config.optim == MUON:
        return MuonAdamW(groups, rate, betas, **given)
    if config.optim == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(groups, lr=rate, betas=betas, **given)
    return load_function("learner.optim", config.optim)(groups, lr=rate, **given)


def _groups(module: nn.Module, rate: float, decay: float, muon: bool) -> list[dict[str, Any]]:
    """The trained parameters in groups: those with rows, which decay, and vectors. For Muon the matrices except those
    with one row per token (embeddings and output layers)."""
    from asyncrlhf.learner.ranks import by_layout  # imports DTensors, which the driver of a run never needs

    trained = [p for p in module.parameters() if p.requires_grad]
    tables = {id(parameter) for parameter in _tables(module)} if muon else set()
    hidden = [p for p in trained if muon and p.ndim == 2 and min(p.shape) > 1 and id(p) not in tables]
    own = {id(parameter) for parameter in hidden}
    kinds = (
        (decay, True, hidden),
        (decay, False, [p for p in trained if p.ndim >= 2 and id(p) not in own]),
        (0.0, False, [p for p in trained if p.ndim < 2]),
    )
    return [
        {"params": part, "weight_decay": d, "lr": rate, "base_lr": rate} | ({MUON: is_hidden} if muon else {})
        for d, is_hidden, every in kinds
        for part in by_layout(every)  # which a fused optimizer can update together
    ]


def _tables(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield part.weight
        find: Any = getattr(part, "get_output_embeddings", None)
        output = find() if find is not None else None
        if output is not None:
            yield output.weight
