"""An output layer that works in float32, whatever the format of the passes."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from asyncrlhf.errors import ConfigError


class Float32Linear(nn.Linear):
    """A linear layer whose product, sum and result are float32, under autocast and with lower weights as well."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: transformers.PreTrainedModel) -> None:
    """Let the output layer of ``model`` work in float32, in place; copies of the model made later do, too.

    Logits of bfloat16 keep 8 bits: at 20 they are rounded by up to 0.06, and so are log-probs. Raises ConfigError for a
    model whose output layer is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head) not in (nn.Linear, Float32Linear):
        raise ConfigError(
            f"learner.float32_head=true: the output layer of a {type(model).__name__} is a {type(head).__name__}; "
            "allowed: a plain linear layer without an adapter, or float32_head=false."
        )
    head.__class__ = Float32Linear
