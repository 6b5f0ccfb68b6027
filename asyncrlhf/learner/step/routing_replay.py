"""Routing replay (Ma et al., 2510.11370): the learner sends each token to the experts that the generator chose for it.

Another rounding, or weights of another version, can change the choice at a near tie of two experts, and with it the
token's probability far more than the weights have moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.learner.ranks import Peers, all_sum
from asyncrlhf.models.routes import Router, Routers
from asyncrlhf.types import TrainBatch


class RoutingReplay:
    """Lets ``model`` follow the routes in the layout of each packed pass; without routes it chooses itself.

    The layout comes with each call of a decoder layer, so that a layer that is computed again in the backward pass
    follows the same routes. Install it before the weights are dealt out over ranks, and after copies were made that
    shall choose for themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = Routers(model)
        self._followed: dict[int, torch.Tensor] = {}  # of each layer: choices that differ, choices
        for router in self._routers.all:
            given: dict[str, torch.Tensor | None] = {"routes": None}
            router.layer.register_forward_pre_hook(partial(self._hand_on, router, given), with_kwargs=True)
            router.module.forward = partial(self._follow, router, given)  # type: ignore[method-assign]

    def check(self, batch: TrainBatch) -> None:
        """Raise AsyncRLHFError for a batch without routes."""
        if batch.num_sequences and batch.routed_experts is None:
            raise AsyncRLHFError("A batch came without its tokens' experts, which learner.routing_replay follows.")

    def _hand_on(
        self, router: Router, given: dict[str, Any], _layer: Any, _args: Any, options: Mapping[str, Any]
    ) -> None:
        routes = options["packed_layout"].routes
        given["routes"] = None if routes is None else routes[:, self._routers.columns(router)].long()

    def _follow(self, router: Router, given: Mapping[str, torch.Tensor | None], hidden: torch.Tensor) -> Any:
        routes = given["routes"]
        if routes is None:
            return type(router.module).forward(router.module, hidden)
        found, imposed = self._routers.impose(router.module, routes, hidden)
        assert imposed.own is not None
        with torch.no_grad():
            same = (routes[:, :, None] == imposed.own[:, None, :]).sum()
            counts = torch.stack([routes.numel() - same, torch.full_like(same, routes.numel())])
            before = self._followed.get(router.place)
            self._followed[router.place] = counts if before is None else before + counts
        return found

    def differing(self, ranks: int, device: torch.device) -> float:
        """The share of the choices followed since the last call, on all ranks, that the model would not have made."""
        counts = sum(self._followed.values(), torch.zeros(2, dtype=torch.int64, device=device))
        self._followed.clear()
        differ, count = all_sum(counts, Peers(ranks=ranks)).tolist()
        return float(differ / max(count, 1))
