"""The experts that the tokens of the hf engine's slots passed: read from the routers, kept until a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncrlhf.models.routes import RouteArray, Router, Routers
from asyncrlhf.types import IntArray


class RouteTable:
    """Routes [slots, length, width] of each row's tokens, on the host, from the routers of ``model``, each of which is
    called once in a forward pass.

    A token's routes are those of its first pass. A row that is prefilled again under new weights keeps them: under
    these routes its tokens were sampled.
    """

    def __init__(self, model: nn.Module, slots: int) -> None:
        """Raises ConfigError for a model whose routers cannot be followed."""
        self._routers = Routers(model)
        self._routes = np.zeros((slots, 0, self._routers.width), self._routers.dtype)
        self._known = np.zeros(slots, np.int64)  # tokens of each row whose routes are known
        self._seen: dict[int, torch.Tensor] = {}  # by layer, of the last forward pass
        for router in self._routers.all:
            router.module.register_forward_hook(partial(self._see, router))

    def occupy(self, row: int, length: int) -> None:
        """Begin a sequence of at most ``length`` tokens in ``row``."""
        if length > self._routes.shape[1]:
            self._routes = np.pad(self._routes, ((0, 0), (0, length - self._routes.shape[1]), (0, 0)))
        self._known[row] = 0

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Give ``target`` the routes of ``source``, of the first ``length`` tokens, or of all."""
        known = int(self._known[source]) if length is None else length
        self._routes[target, :known] = self._routes[source, :known]
        self._known[target] = known

    def record(self, rows: IntArray, length: IntArray, prefills: Sequence[tuple[IntArray, list[int]]]) -> None:
        """Keep the routes of the last forward pass (``slots.plan_step``): one token of each row, of which those in
        ``rows`` count, then the prefilled sequences with the rows that share them. ``length`` [rows of the pass]: of
        each row, with that token."""
        passed, start = self._last_pass(), len(length)
        for sequence, sharers in prefills:
            for row in sharers:
                known = int(self._known[row])
                self._routes[row, known : len(sequence)] = passed[start + known : start + len(sequence)]
                self._known[row] = max(known, len(sequence))
            start += len(sequence)
        fresh = rows[self._known[rows] < length[rows]]
        self._routes[fresh, length[fresh] - 1] = passed[fresh]
        self._known[fresh] = length[fresh]

    def take(self, row: int, length: int) -> RouteArray:
        """A copy [length, width]."""
        assert self._known[row] == length, f"routes of {self._known[row]} of {length} tokens"
        return self._routes[row, :length].copy()

    def _see(self, router: Router, _module: nn.Module, _given: Any, found: tuple[torch.Tensor, ...]) -> None:
        self._seen[router.place] = found[2]

    def _last_pass(self) -> RouteArray:
        """[T, width]"""
        some = next(iter(self._seen.values()))
        routes = torch.zeros((len(some), self._routers.width), dtype=some.dtype, device=some.device)
        for router in self._routers.all:
            routes[:, self._routers.columns(router)] = self._seen[router.place]
        return routes.cpu().numpy().astype(self._routers.dtype)
