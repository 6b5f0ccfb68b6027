"""Which packed tokens each rank of a ring has, and which keys of each rank its queries see.

The packed tokens are cut into twice as many stretches as there are ranks, and rank r has the stretches r from the front
and r from the back: a late token has more keys than an early one, so this balances the ranks' work (the zigzag of Zhu's
ring-flash-attention). Sequences are cut where a stretch ends; a shared prompt stays where it was packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from asyncrlhf.types import IntArray

Stretch = tuple[int, int, int]  # first packed token, the one after the last, and the offset to the index on the rank


@dataclass(frozen=True)
class Rectangles:
    """R runs of queries of one rank, each of which sees one run of keys of another: all of them, or, where ``causal``,
    those up to itself."""

    queries: IntArray  # [R, 2] the first token's index on its rank, and the number of tokens
    keys: IntArray  # [R, 2]
    causal: bool = False

    def slices(self) -> Iterator[tuple[slice, slice]]:
        for (first, count), (key, keys) in zip(self.queries.tolist(), self.keys.tolist(), strict=True):
            yield slice(first, first + count), slice(key, key + keys)

    def rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token of the queries and of the keys, run by run."""
        queries, keys = (torch.from_numpy(_rows(runs)).to(device) for runs in (self.queries, self.keys))
        return queries, keys


@dataclass(frozen=True)
class RingPlan:
    """One rank's view of the others."""

    rank: int
    rows: IntArray  # [T] its packed tokens
    sizes: tuple[int, ...]  # tokens of each rank
    spans: torch.Tensor  # [n, 4] its own part of each sequence, as ``varlen.plan_calls`` takes it
    blocks: tuple[tuple[Rectangles, ...], ...]  # each rank's keys that its queries see, at most once per query
    positions: tuple[torch.Tensor, ...]  # [T] of each rank's tokens in their sequences
    longest: int  # tokens of the longest sequence


def plan_ring(spans: IntArray, positions: IntArray, rank: int, ranks: int) -> RingPlan:
    """``spans`` [N, 4] of a packed batch as ``varlen.plan_calls`` takes them, ``positions`` [K] of its tokens."""
    borders = np.arange(2 * ranks + 1) * len(positions) // (2 * ranks)
    stretches = [_stretches(borders, place, ranks) for place in range(ranks)]
    rows = [np.concatenate([np.arange(first, end) for first, end, _ in both]) for both in stretches]
    own, prompts = spans[:, :2], spans[:, 2:]
    mine = _within(own, stretches[rank])
    local = np.concatenate([mine, _within(prompts, stretches[rank])], axis=1)[mine[:, 1] > 0]
    blocks: list[tuple[Rectangles, ...]] = []
    for source in range(ranks):
        if source == rank:
            parts = [_rectangles(mine, mine, causal=True), _rectangles(mine, _within(prompts, stretches[rank]))]
        else:
            # It sees the front stretch of an earlier rank; its back stretch alone sees those of a later rank.
            queries = mine if source < rank else _within(own, stretches[rank][1:])
            seen = stretches[source][:1] if source < rank else stretches[source]
            parts = [_rectangles(queries, _within(keys, seen)) for keys in (own, prompts)]
        blocks.append(tuple(part for part in parts if len(part.queries)))
    return RingPlan(
        rank=rank,
        rows=rows[rank],
        sizes=tuple(len(part) for part in rows),
        spans=torch.from_numpy(np.ascontiguousarray(local)),
        blocks=tuple(blocks),
        positions=tuple(torch.from_numpy(positions[part]) for part in rows),
        longest=int(positions.max()) + 1,
    )


def _stretches(borders: IntArray, rank: int, ranks: int) -> tuple[Stretch, Stretch]:
    front, back = rank, 2 * ranks - 1 - rank
    first, end, late = int(borders[front]), int(borders[front + 1]), int(borders[back])
    return (first, end, -first), (late, int(borders[back + 1]), end - first - late)


def _within(runs: IntArray, stretches: tuple[Stretch, ...]) -> IntArray:
    """[N, 2]: the part of ``runs`` [N, 2] of packed tokens inside the stretches, as indices on their rank; zeros if
    there is none.

    A run with a part in both stretches is one run there too, because it contains everything between them.
    """
    found = np.zeros_like(runs)
    for first, end, shift in stretches:
        low = np.maximum(runs[:, 0], first)
        count = np.maximum(np.minimum(runs.sum(axis=1), end) - low, 0)
        found[:, 0] = np.where((found[:, 1] == 0) & (count > 0), low + shift, found[:, 0])
        found[:, 1] += count
    return found


def _rectangles(queries: IntArray, keys: IntArray, causal: bool = False) -> Rectangles:
    """Those with a query and a key; neighbouring queries that see the same keys, as siblings do, are one run."""
    there = (queries[:, 1] > 0) & (keys[:, 1] > 0)
    queries, keys = queries[there], keys[there]
    new = np.ones(len(queries), dtype=np.bool_)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1) | (queries[1:, 0] != queries[:-1].sum(axis=1))
    starts = np.flatnonzero(new)
    counts = np.add.reduceat(queries[:, 1], starts) if len(starts) else starts
    return Rectangles(np.stack([queries[starts, 0], counts], axis=1), keys[starts], causal)


def _rows(runs: IntArray) -> IntArray:
    firsts, counts = runs.T
    return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
