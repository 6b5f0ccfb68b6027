"""The slow target network of ``algorithm.anchor=ema``: an exponential moving average of the policy."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.learner.forward import PackedPolicy


class EmaPolicy:
    """A frozen copy of the policy that follows it: target = decay target + (1 - decay) policy, once a learner step.

    The same on every rank, as the policy is; it costs its memory and one forward pass a step (IMPACT, 1912.00167, has
    a target network that is replaced now and then instead).
    """

    def __init__(self, model: PreTrainedModel, decay: float, device: torch.device) -> None:
        self._decay = decay
        self._copy: nn.Module = nn.Module.to(copy.deepcopy(model).eval().requires_grad_(False), device)
        self.policy = PackedPolicy(self._copy)  # type: ignore[arg-type]

    @torch.no_grad()
    def update(self, policy: Iterable[tuple[str, torch.Tensor]]) -> None:
        """``policy``: its named parameters, in the model's order."""
        for target, (_, source) in zip(self._copy.parameters(), policy, strict=True):
            target.lerp_(source.to(target), 1.0 - self._decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._copy.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._copy.load_state_dict(state)
