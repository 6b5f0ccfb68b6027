"""Reading weights of which each rank holds a shard: piece by piece, so that no device ever holds all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

PIECE_BYTES = 2**27  # of whole tensors that a rank holds at once; a single larger tensor is a piece of its own


class Shards(Protocol):
    """The policy's tensors where no rank holds them whole. All ranks gather the same names in the same order."""

    def layout(self) -> Mapping[str, torch.Tensor]:
        """Name, shape and dtype of every tensor, on the device ``meta``; nothing is gathered."""
        ...

    def gather(self, names: tuple[str, ...]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """These tensors whole, on every rank, as long as the context lasts."""
        ...


class DTensorShards:
    """Of a model whose parameters are DTensors, as FSDP2 leaves them between passes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def layout(self) -> Mapping[str, torch.Tensor]:
        return {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            for name, parameter in self._model.named_parameters()
        }

    @contextmanager
    @torch.no_grad()
    def gather(self, names: tuple[str, ...]) -> Iterator[Mapping[str, torch.Tensor]]:
        parameters = dict(self._model.named_parameters())
        yield {name: whole(parameters[name]) for name in names}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached, gathered from all ranks if it is sharded."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def pieces(layout: Mapping[str, torch.Tensor], limit: int = PIECE_BYTES) -> Iterator[tuple[str, ...]]:
    """The names in order, in runs of at most ``limit`` bytes."""
    piece: list[str] = []
    total = 0
    for name, tensor in layout.items():
        if piece and total + tensor.nbytes > limit:
            yield tuple(piece)
            piece, total = [], 0
        piece.append(name)
        total += tensor.nbytes
    if piece:
        yield tuple(piece)


def gathered(shards: Shards, names: tuple[str, ...] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor (of ``names``) whole, good until the next is asked for; all ranks must come to the end."""
    layout = shards.layout()
    chosen = layout if names is None else {name: layout[name] for name in names}
    for piece in pieces(chosen):
        with shards.gather(piece) as tensors:
            yield from tensors.items()


def on_host(shards: Shards, rank: int, names: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Copies in rank 0's host memory; the other ranks take part and get nothing."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in gathered(shards, names) if rank == 0}
