"""Attention written out, tile by tile: for soft caps and attention sinks, which torch's fused kernels do not take.

A tile holds some runs of queries, each with all the keys that it sees, padded to one size. If the scores are many, the
backward pass computes those of one tile at a time again, so that memory grows with the tokens, not with their square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from asyncrlhf.types import IntArray

RUN = 128  # queries of one run, at most: a window of W keys costs (W + RUN) / W times its pairs
SHORTEST_RUN = 16
TILE_SCORES = 2**22  # of all heads: 16 MiB of float32; four times as many take twice as long on a CPU
# Scores of one pass through a layer from which they are computed again in the backward pass instead of kept.
KEPT_SCORES = 2**20
# Pairs of query and key whose padding costs less than another tile.
TILE = 2**12


class Scoring(NamedTuple):
    """How products of queries and keys become weights."""

    scale: float
    window: int | None = None  # keys that a query sees, itself included; None: all
    softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap)
    sinks: torch.Tensor | None = None  # [heads] the logit of a key without a value

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernels compute it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Tile:
    """R runs of up to ``queries`` queries and ``keys`` keys."""

    runs: torch.Tensor  # [R, 8] the columns of ``_runs``
    queries: int
    keys: int
    kept: torch.Tensor  # [n] which of the R * queries are no padding


@dataclass(frozen=True)
class Tiles:
    """All tiles of a packed batch."""

    parts: tuple[Tile, ...]
    order: torch.Tensor  # [T] where the queries of the tiles, one after the other, have each packed row
    scores: int  # of one head


def plan_tiles(spans: IntArray, window: int | None, most: int) -> Tiles:
    """The tiles of sequences with ``spans`` [N, 4] as in ``varlen.plan_calls``, each of at most ``most`` scores of one
    head unless it is a single run."""
    runs = np.array([run for span in spans.tolist() for run in _runs(*span, window=window, most=most)])
    runs = runs[np.lexsort((-runs[:, 1], -runs[:, 3]))]
    parts: list[Tile] = []
    start, own, widest = 0, 0, 0
    for index, (count, keys) in enumerate(runs[:, [1, 3]].tolist()):
        widest, own = max(widest, count), own + count * keys
        padded = (index + 1 - start) * widest * int(runs[start, 3])
        if index > start and (padded > most or padded - own > max(TILE, own // 4)):
            parts.append(_tile(runs[start:index]))
            start, own, widest = index, count * keys, count
    parts.append(_tile(runs[start:]))
    rows = np.concatenate([np.arange(first, first + count) for first, count in runs[:, :2].tolist()])
    scores = sum(len(part.runs) * part.queries * part.keys for part in parts)
    return Tiles(tuple(parts), torch.from_numpy(np.argsort(rows)), scores)


def _runs(
    first: int, own: int, prompt: int, shared: int, *, window: int | None, most: int
) -> Iterator[tuple[int, ...]]:
    """Of each run of a sequence: its first packed row, its number of queries, the place of the first in the sequence,
    the number of keys, the place of the first, and what turns a place into a packed row: in the prompt that is packed
    elsewhere, whose places are below the last column, and in the sequence's own part."""
    longest = own + shared if window is None else min(own + shared, window + RUN)
    size = min(RUN, max(SHORTEST_RUN, most // longest)) if own else RUN
    for start in range(0, own, size):
        count, place = min(size, own - start), shared + start
        key = 0 if window is None else max(0, place - window + 1)
        yield first + start, count, place, place + count - key, key, prompt, first - shared, shared


def _tile(runs: IntArray) -> Tile:
    queries = int(runs[:, 1].max())
    kept = np.flatnonzero(np.arange(queries) < runs[:, 1:2])
    return Tile(torch.from_numpy(runs), queries, int(runs[0, 3]), torch.from_numpy(kept))


@lru_cache(maxsize=64)
def _tiles(spans: bytes, window: int | None, most: int) -> Tiles:
    return plan_tiles(np.frombuffer(spans, dtype=np.int64).reshape(-1, 4), window, most)


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here, a second of each process
def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D] in the type of ``value``.

    ``spans`` [N, 4] as in ``varlen.plan_calls``. Everything is computed in float32 at least, under autocast as well.
    """
    heads, device = query.shape[1], query.device
    plan = _tiles(spans.numpy().tobytes(), scoring.window, TILE_SCORES // heads)
    again = torch.is_grad_enabled() and plan.scores * heads > KEPT_SCORES
    parts = []
    for tile in plan.parts:
        given = (tile, query, key, value, *scoring)
        found = checkpoint(_attend, *given, use_reentrant=False, preserve_rng_state=False) if again else _attend(*given)
        parts.append(found)
    return torch.cat(parts).index_select(0, plan.order.to(device))[None]


def _attend(
    tile: Tile,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[n, heads, D] of the n queries of one tile."""
    device, kind = query.device, torch.promote_types(value.dtype, torch.float32)
    first, count, place, keys, key_place, prompt, own, shared = tile.runs.to(device)[..., None].unbind(1)
    columns = torch.minimum(torch.arange(tile.queries, device=device), count - 1)
    places = torch.arange(tile.keys, device=device)
    padding = places >= keys
    places = key_place + torch.minimum(places, keys - 1)
    rows = torch.where(places < shared, prompt, own) + places  # [R, K]
    distance = (place + columns)[:, :, None] - places[:, None]
    hidden = (distance < 0) | padding[:, None]
    if window is not None:
        hidden |= distance >= window

    def taken(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return tensor[0].index_select(1, where.flatten()).unflatten(1, where.shape).to(kind)  # [heads, R, ..., D]

    with torch.autocast(device.type, enabled=False):
        k, v = taken(key, rows), taken(value, rows)
        q = taken(query, first + columns).unflatten(0, (len(k), -1)).transpose(1, 2)  # [kv_heads, R, group, Q, D]
        group = q.shape[2:4]
        scores = (q.flatten(2, 3) @ k.transpose(2, 3) * scale).unflatten(2, group)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        out = (scores.softmax(-1).flatten(2, 3) @ v).unflatten(2, group)
        if sinks is not None:
            logits = sinks.to(kind).view(len(k), 1, -1, 1)
            out = out * torch.sigmoid(scores.logsumexp(-1) - logits)[..., None]
    out = out.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)  # [R * Q, heads, D]
    return out.index_select(0, tile.kept.to(device)).to(value.dtype)
