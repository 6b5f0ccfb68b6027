"""Weights in half precision for the passes, beside the float32 weights that the optimizer updates.

Autocast casts every weight for each microbatch, and leaves norms, rotations and the residual stream in float32. Here a
weight is cast once an update, and the passes are those of a model that was loaded in half precision, as the generators
compute. Gradients arrive at the float32 weights through the cast, so that they add up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from asyncrlhf.learner.model.forward import Float32Linear


class Halves:
    """Lets the modules of ``module`` see their float32 parameters in ``dtype`` until :meth:`end`.

    ``module.parameters()``, state dicts and optimizers go on with the float32 parameters: a module's attribute hides
    them. ``caller``: the part of ``module`` that each pass calls before any weight is used.
    """

    def __init__(self, module: nn.Module, caller: nn.Module, dtype: torch.dtype) -> None:
        self._places = list(_lowered(module))
        self._dtype, self._versions = dtype, [-1] * len(self._places)
        self._hook = caller.register_forward_pre_hook(self.refresh)

    @torch.enable_grad()
    def refresh(self, *_: Any) -> None:
        """Cast the parameters again that have changed since they were cast."""
        made: dict[int, torch.Tensor] = {}
        for place, (part, name) in enumerate(self._places):
            own = part._parameters[name]
            assert own is not None
            if own._version != self._versions[place] or name not in vars(part):
                if id(own) not in made:
                    made[id(own)] = own.to(self._dtype)
                vars(part)[name] = made[id(own)]
                self._versions[place] = own._version

    def drop(self) -> None:
        """Free the casts until the next pass; needed where parameters change without torch's knowledge."""
        for part, name in self._places:
            vars(part).pop(name, None)

    def end(self) -> None:
        self._hook.remove()
        self.drop()


def lower(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the float32 parameters of a module that is never updated, in place."""
    for part, name in _lowered(module):
        own = part._parameters[name]
        assert own is not None
        own.data = own.data.to(dtype)


def _lowered(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The float32 parameters, by the modules that use them, but for those that transformers, or ``float32_head``, keeps
    in float32."""
    keeps = [
        f"{prefix}.{name}".strip(".")
        for prefix, part in module.named_modules()
        for name in getattr(part, "_keep_in_fp32_modules_strict", None) or ()
    ]
    for prefix, part in module.named_modules():
        kept = any(f".{name.rpartition('.')[2]}." in f".{prefix}." for name in keeps)
        for name, own in part._parameters.items():
            named = any(wanted.rpartition(".")[2] == name for wanted in keeps)
            if own is None or own.dtype != torch.float32 or kept or named or isinstance(part, Float32Linear):
                continue
            yield part, name
