"""Loads a rank's part of the weights from files; no rank ever holds the whole model."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrlhf.data.weight_files import WeightFiles
from asyncrlhf.learner.spans import local_spans, overlaps


@torch.no_grad()
def read_shards(
    module: nn.Module, files: WeightFiles, model: transformers.PreTrainedModel, device: torch.device
) -> None:
    """Give the parameters of ``module``, which are DTensors on the device ``meta``, this rank's part of their
    tensors in ``files``; a tensor after another, so that beside the shards one of them is there at a time.

    ``module`` is a policy or a critic around ``model`` or its trunk. What the files lack, a critic's head, is zero.
    """
    shared = [names for names in _names(module).values() if len(names) > 1]

    def made(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(made)  # parameters become new ones, also those that were one
    for first, *others in shared:
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        known = name_in_files(name, model, files)
        if known is None:
            local.zero_()
            continue
        for here, (rows, *columns) in overlaps(local_spans(parameter), [[[0, size]] for size in parameter.shape]):
            local[here] = files.rows(known, rows.start, rows.stop, *columns).to(local)


def name_in_files(name: str, model: transformers.PreTrainedModel, files: WeightFiles) -> str | None:
    """The name in the files of a parameter of a policy (``model.*``) or a critic (``trunk.*``)."""
    part, _, rest = name.partition(".")
    known = f"{model.base_model_prefix}.{rest}" if part == "trunk" else rest
    return known if known in files.names else None


def _names(module: nn.Module) -> dict[int, list[str]]:
    """The name in the files of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
