"""The critic: a value head on a copy of the policy's trunk."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.learner.forward import PackedInputs, packed_hidden


class ValueModel(nn.Module):
    """Maps ``PackedInputs`` to the values [M] of the states in which the M response tokens were chosen.

    The trunk starts as a copy of the policy's and then learns on its own, so that the value loss cannot disturb the
    policy. The head starts at zero: the first advantages are those of no baseline.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy.base_model)
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: PackedInputs) -> torch.Tensor:
        hidden = packed_hidden(self.trunk, inputs).index_select(0, inputs.rows)
        return self.head(hidden).squeeze(-1).float()
