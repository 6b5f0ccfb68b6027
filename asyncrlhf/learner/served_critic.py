"""A copy of the critic apart from the learner: its values of finished rollouts, one version at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.learner.attention import use_packed_attention
from asyncrlhf.learner.critic import ValueModel
from asyncrlhf.learner.forward import PackedInputs
from asyncrlhf.learner.rollout_passes import RolloutPasses
from asyncrlhf.types import FloatArray, Rollout


class ServedCritic(RolloutPasses):
    """Gives what the learner's own critic of that version would give: the same packed pass.

    Args:
        policy: the model that the learner starts with, on its device; its trunk becomes the critic's.
        precision, token_budget: as in :class:`~asyncrlhf.learner.rollout_passes.RolloutPasses`.
    """

    model_name, what, setting = "critic", "values", "critic.token_budget"

    def __init__(self, policy: PreTrainedModel, *, precision: str, token_budget: int) -> None:
        super().__init__(policy.device, precision, token_budget)
        use_packed_attention(policy)
        self._critic = ValueModel(policy, keep_policy=False).eval()
        self._trained = {name: p.detach() for name, p in self._critic.named_parameters() if p.requires_grad}
        self._critic.requires_grad_(False)
        self.version: int | None = None

    @torch.no_grad()
    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Be the critic of ``version``. Raises WeightSyncError when the tensors are not those that training changes."""
        wrong = sorted(tensors.keys() ^ self._trained.keys())
        if wrong:
            raise WeightSyncError(
                f"The critic of version {version} does not fit its worker: {wrong[0]} is in one alone."
            )
        self.version = None
        for name, tensor in self._trained.items():
            tensor.copy_(tensors[name])
        self.version = version

    def _flat(self, inputs: PackedInputs) -> torch.Tensor:
        if self.version is None:
            raise WeightSyncError("A critic worker was asked for values before it held a version.")
        values: torch.Tensor = self._critic(inputs)
        return values

    def _with(self, rollout: Rollout, numbers: FloatArray) -> Rollout:
        return replace(rollout, values=numbers, critic_version=self.version)
