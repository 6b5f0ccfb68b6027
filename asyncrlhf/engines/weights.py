"""Loading of named weights into a model's parameters, in place, with every mismatch named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from asyncrlhf.errors import WeightSyncError


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters by name, tied ones once under their first name."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def match_named_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``weights`` under the names of the parameters, each once; a tied tensor may come under any of its names.

    Raises WeightSyncError that names what is missing, unknown or of another shape.
    """
    own = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in own.items()}
    aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    unknown = [name for name in weights if name not in aliases]
    given = {aliases[name]: tensor for name, tensor in weights.items() if name in aliases}
    given.update({name: tensor for name, tensor in weights.items() if name in own})
    missing = [name for name in own if name not in given]
    shapes = [
        f"{name} is {tuple(given[name].shape)} instead of {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if name in given and given[name].shape != parameter.shape
    ]
    _refuse(missing, unknown, shapes)
    return {name: given[name] for name in own}


def _refuse(missing: Sequence[str], unknown: Sequence[str], shapes: Sequence[str]) -> None:
    problems = [
        f"{kind}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("wrong shape", shapes))
        if names
    ]
    if problems:
        raise WeightSyncError(f"The weights do not fit the engine's model ({'; '.join(problems)}).")


def load_named_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` into the parameters; the dtype may differ, names and shapes may not.

    Nothing is written unless everything fits: raises what :func:`match_named_weights` raises.
    """
    given = match_named_weights(model, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])
