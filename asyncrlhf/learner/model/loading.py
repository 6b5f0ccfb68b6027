"""Loads a rank's part of the weights from files; no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrlhf.learner.model.model_pass import name_of_trunk
from asyncrlhf.learner.ranks import local_spans, overlaps
from asyncrlhf.models.weight_files import WeightFiles


def read_shards(
    module: nn.Module,
    files: WeightFiles,
    model: transformers.PreTrainedModel,
    device: torch.device,
    same: Mapping[str, str] | None = None,
) -> None:
    """Load this rank's part of the tensors in ``files`` into the parameters of ``module``, which are on the device
    ``meta``, DTensors or whole; one tensor after the other, so that only one is in memory beside the shards.

    ``module`` is a policy or a critic around ``model`` or its trunk. ``same``: the names in the files of parameters
    that have another name. A tensor that the files lack (a critic's head) is zero.
    """

    def made(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    _renew(module, made)
    read_into(module, files, model, same)


@torch.no_grad()
def read_into(
    module: nn.Module,
    files: WeightFiles,
    model: transformers.PreTrainedModel,
    same: Mapping[str, str] | None = None,
) -> None:
    """As :func:`read_shards`, into parameters that have their memory."""
    for name, parameter in module.named_parameters():
        whole = [[[0, size]] for size in parameter.shape]
        own = local_spans(parameter) if isinstance(parameter, DTensor) else whole
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        known = (same or {}).get(name) or name_in_files(name, model, files)
        if known is None:
            local.zero_()
            continue
        for here, (rows, *columns) in overlaps(own, whole):
            local[here] = files.rows(known, rows.start, rows.stop, *columns).to(local)


def hold_places(module: nn.Module) -> None:
    """Replace parameters on the device ``meta`` by ones in host memory that have the same shape and take one number's
    bytes, until :func:`in_turn` loads their tensors."""
    _renew(module, lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape) if t.is_meta else t)


@torch.no_grad()
def in_turn(
    module: nn.Module, files: WeightFiles, model: transformers.PreTrainedModel, reads: bool
) -> Iterator[nn.Parameter]:
    """The parameters of ``module`` after :func:`hold_places`, each with its whole tensor once it is yielded; the caller
    releases it. With ``reads`` False the tensor is only allocated.

    ``module``, ``model``: see :func:`read_shards`.
    """
    for name, parameter in module.named_parameters():
        known, first = name_in_files(name, model, files), parameter.shape[0]
        if not reads:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
        elif known is None:
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype)
        else:
            parameter.data = files.rows(known, 0, first).to(parameter.dtype)
        yield parameter


def _renew(module: nn.Module, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply ``made`` to parameters and buffers; parameters are replaced, and tied ones stay tied."""
    shared = [names for names in _names(module).values() if len(names) > 1]
    module._apply(made)
    for first, *others in shared:
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))


def name_in_files(name: str, model: transformers.PreTrainedModel, files: WeightFiles) -> str | None:
    """The name in the files of a parameter of a policy (``model.*``) or a critic (``trunk.*``)."""
    part, _, rest = name.partition(".")
    known = f"{name_of_trunk(model)}.{rest}".lstrip(".") if part == "trunk" else rest
    return known if known in files.names else None


def _names(module: nn.Module) -> dict[int, list[str]]:
    """The name in the files of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
