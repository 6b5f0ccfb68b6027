"""Weights out of files into what a rank holds of them: no rank ever has the whole model."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrlhf.data.weight_files import WeightFiles


@torch.no_grad()
def read_shards(
    module: nn.Module, files: WeightFiles, model: transformers.PreTrainedModel, device: torch.device
) -> None:
    """Give the parameters of ``module``, which lie on the device ``meta`` in shards by rows, this rank's rows of their
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
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        known = name_in_files(name, model, files)
        if known is None:
            local.zero_()
        elif len(local):
            local.copy_(files.rows(known, offset[0], offset[0] + len(local)))


def name_in_files(name: str, model: transformers.PreTrainedModel, files: WeightFiles) -> str | None:
    """Of a parameter of a policy (``model.*``) or a critic (``trunk.*``)."""
    part, _, rest = name.partition(".")
    known = f"{model.base_model_prefix}.{rest}" if part == "trunk" else rest
    return known if known in files.names else None


def _names(module: nn.Module) -> dict[int, list[str]]:
    """Of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
