"""The position of a rank's part within a whole DTensor: for each dimension, runs of [first, last)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Spans = list[list[list[int]]]  # for each dimension the runs of the part, in order
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor of ``shape``: the ``values`` that ``spans`` select, in their order."""

    values: torch.Tensor
    shape: tuple[int, ...]
    spans: Spans


def extent(spans: Spans) -> tuple[int, ...]:
    """The part's own shape."""
    return tuple(sum(last - first for first, last in runs) for runs in spans)


def local_spans(tensor: DTensor) -> Spans:
    """The spans of this rank's part; no communication."""
    return [_runs(tensor, dim) for dim in range(tensor.ndim)]


def _runs(tensor: DTensor, dim: int) -> list[list[int]]:
    """torch divides row numbers in the same way as rows."""
    size = tensor.shape[dim]
    along = [_along_first(placement, dim) for placement in tensor.placements]
    if all(placement.is_replicate() for placement in along):
        return [[0, size]]
    rows = torch.arange(size, device=tensor.device_mesh.device_type)
    own = distribute_tensor(rows, tensor.device_mesh, along, src_data_rank=None).to_local().tolist()
    breaks = [i for i in range(1, len(own)) if own[i] != own[i - 1] + 1]
    return [[own[i], own[j - 1] + 1] for i, j in itertools.pairwise([0, *breaks, len(own)])] if own else []


def _along_first(placement: Any, dim: int) -> Any:
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def overlaps(own: Spans, other: Spans) -> Iterator[tuple[Slices, Slices]]:
    """The blocks that two parts of one tensor share: the place of each in ``own`` and in ``other``."""
    along = [list(_common(a, b)) for a, b in zip(own, other, strict=True)]
    for blocks in itertools.product(*along):
        yield tuple(here for here, _ in blocks), tuple(there for _, there in blocks)


def _common(own: list[list[int]], other: list[list[int]]) -> Iterator[tuple[slice, slice]]:
    here = 0
    for first, last in own:
        there = 0
        for start, stop in other:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield (
                    slice(here + low - first, here + high - first),
                    slice(there + low - start, there + high - start),
                )
            there += stop - start
        here += last - first
