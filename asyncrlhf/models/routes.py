"""The routers of a mixture-of-experts model, and their choice of experts for each token.

The routes of a token are ``Routers.width`` numbers: the experts that it passes in layer 0, then those in layer 1, and
so on; zeros in layers without experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from asyncrlhf.errors import ConfigError

RouteArray = NDArray[np.uint8] | NDArray[np.uint16]
_LAYER = re.compile(r"(.*\blayers\.(\d+))\.")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k")


class Router(NamedTuple):
    """``place``: the number of its decoder layer, from 0."""

    place: int
    layer: nn.Module
    module: nn.Module


class Routers:
    """The routers of ``model``, each of which must choose its experts by one ``topk`` over all of them.

    Raises ConfigError for a model without experts, or whose routers choose in another way.
    """

    def __init__(self, model: nn.Module) -> None:
        shape: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.layers: int = shape.num_hidden_layers
        self.experts, self.chosen = _size(shape, _EXPERTS), _size(shape, _CHOSEN)
        what = "learner.routing_replay=true needs a mixture of experts whose routers choose by topk, such as Qwen3-MoE"
        if not (self.experts and self.chosen):
            raise ConfigError(f"{what}; a model of the kind {shape.model_type} has no experts.")
        self.all = _find(model)
        if not self.all or not all(self._obeys(router.module, shape.hidden_size) for router in self.all):
            raise ConfigError(f"{what}; those of a model of the kind {shape.model_type} do not.")

    @property
    def width(self) -> int:
        """The numbers of one token: ``chosen`` of each layer, 0 in layers without experts."""
        return self.layers * self.chosen

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        return np.uint8 if self.experts <= 256 else np.uint16

    def columns(self, router: Router) -> slice:
        """The router's part of a token's ``width`` numbers."""
        return slice(router.place * self.chosen, (router.place + 1) * self.chosen)

    def impose(self, module: nn.Module, given: torch.Tensor, hidden: torch.Tensor) -> tuple[Any, _Imposed]:
        """The router's own output for ``hidden`` with the experts ``given`` [T, chosen]."""
        with _Imposed(given, self.experts) as imposed:
            return type(module).forward(module, hidden), imposed

    def _obeys(self, module: nn.Module, width: int) -> bool:
        weight = next(module.parameters())
        given = torch.zeros((2, self.chosen), dtype=torch.int64, device=weight.device)
        hidden = torch.zeros((2, width), dtype=weight.dtype, device=weight.device)
        try:
            with torch.no_grad():
                found, imposed = self.impose(module, given, hidden)
        except TypeError:  # it wants more than hidden states
            return False
        return imposed.calls == 1 and isinstance(found, tuple) and len(found) == 3 and found[2] is given


class _Imposed(TorchFunctionMode):
    """Within this context a ``topk`` over all ``experts`` takes those ``given`` [T, k].

    ``own``: the experts that it would have chosen itself [T, k]; None if there was no such call.
    """

    def __init__(self, given: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._given, self._shape = given, (*given.shape[:-1], experts)
        self.own: torch.Tensor | None = None
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or found[1].shape != self._given.shape:
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.shape != self._shape:
            return found
        self.own = found[1]
        self.calls += 1
        return torch.return_types.topk((scores.gather(-1, self._given), self._given))


def _size(shape: Any, names: Sequence[str]) -> int:
    """The first of these settings that a model's config has; 0 if it has none."""
    return next((int(found) for name in names if (found := getattr(shape, name, None))), 0)


def _find(model: nn.Module) -> list[Router]:
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        inside = _LAYER.match(name)
        if inside and type(module).__name__.lower().endswith("topkrouter"):
            found.append(Router(int(inside[2]), modules[inside[1]], module))
    return found
