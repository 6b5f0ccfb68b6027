"""The critic: a value head on a copy of the policy's trunk."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.learner.forward import PackedInputs, SequenceSplit, packed_hidden


class ValueModel(nn.Module):
    """Maps ``PackedInputs`` to the values [M] of the states in which the M response tokens were chosen.

    The trunk starts as a copy of the policy's and then learns on its own, so that the value loss cannot disturb the
    policy. The head starts at zero: the first advantages are those of no baseline. ``keep_policy=False`` takes the
    trunk itself, for who needs no policy beside it.
    """

    def __init__(self, policy: PreTrainedModel, keep_policy: bool = True) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy.base_model) if keep_policy else policy.base_model
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._sequence: SequenceSplit | None = None

    def split(self, sequence: SequenceSplit) -> None:
        """As ``PackedPolicy.split``."""
        self._sequence = sequence

    def forward(self, inputs: PackedInputs) -> torch.Tensor:
        if self._sequence is None:
            return self._alone(inputs)
        local, own = self._sequence.stretch(inputs)
        return self._sequence.together(self._alone(local), own, len(inputs.rows))

    def _alone(self, inputs: PackedInputs) -> torch.Tensor:
        hidden = packed_hidden(self.trunk, inputs).index_select(0, inputs.rows)
        # No view: FSDP2 puts a hook on what a module returns, which a change in place would take from it.
        return self.head(hidden).float().sum(-1)
