"""Weights of which each learner rank holds a part: offered by name and shape, gathered one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from asyncrlhf.types import TensorEntry, WeightManifest

if TYPE_CHECKING:
    from asyncrlhf.learner.distributed import Shards

Names = tuple[str, ...]


class ShardedParams(Mapping[str, torch.Tensor]):
    """Stands where a sender is given parameters: tensors without values (on ``meta``), and the way to those values.

    Every rank of the learner must gather what the sender's rank gathers: see :func:`take_part`.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._layout = dict(shards.layout())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._layout[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def held(params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """``params`` as they are offered now, whatever the caller does to the mapping."""
    return params if isinstance(params, ShardedParams) else dict(params)


def entries_by_bucket(manifest: WeightManifest) -> list[list[TensorEntry]]:
    """The entries of each bucket, in the manifest's order."""
    found: list[list[TensorEntry]] = [[] for _ in manifest.bucket_bytes]
    for entry in manifest.tensors:
        found[entry.bucket].append(entry)
    return found


def bucket_names(manifest: WeightManifest) -> list[Names]:
    """The names of each bucket's tensors, in order."""
    return [tuple(entry.name for entry in entries) for entries in entries_by_bucket(manifest)]


def portions(manifest: WeightManifest, params: Mapping[str, torch.Tensor]) -> Sequence[Names]:
    """What is copied at once: all tensors where they are at hand, else one bucket's."""
    sharded = isinstance(params, ShardedParams)
    return bucket_names(manifest) if sharded else [tuple(entry.name for entry in manifest.tensors)]


def whole(params: Mapping[str, torch.Tensor], names: Names) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
    """The values of ``names``; where they are gathered, as long as the context lasts."""
    return params.shards.gather(names) if isinstance(params, ShardedParams) else nullcontext(params)


def take_part(manifest: WeightManifest, params: ShardedParams) -> None:
    """What the ranks without a sender do while the sender copies a snapshot of ``manifest``."""
    for names in bucket_names(manifest):
        with params.shards.gather(names):
            pass
