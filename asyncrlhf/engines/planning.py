"""Builds the forward plans of the hf engine: which tokens go through the model, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrlhf.engines.kv_cache import LENGTH_MULTIPLE, ForwardPlan, KVCache, make_buckets
from asyncrlhf.engines.slots import SlotTable
from asyncrlhf.types import IntArray

PREFILL_TOKENS = 8192  # of one forward pass: bounds its memory when many long sequences want a prefill at once


def choose_prefills(table: SlotTable) -> list[tuple[IntArray, list[int]]]:
    """Sequences to prefill now, each with the rows that share it, shortest first.

    A row's last token is left to the decode iteration. Rows with equal tokens (siblings of one group) share one
    prefill. Rows over the budget stay unready and wait for the next step.
    """
    shared: dict[bytes, tuple[IntArray, list[int]]] = {}
    tokens = 0
    for row in np.flatnonzero(~table.ready[: table.count]):
        sequence = table.tokens[row, : table.length[row] - 1]
        if not len(sequence):
            table.ready[row] = True
            continue
        found = shared.get(sequence.tobytes())
        if found is not None:
            found[1].append(int(row))
        elif not shared or tokens + len(sequence) <= PREFILL_TOKENS:
            shared[sequence.tobytes()] = (sequence, [int(row)])
            tokens += len(sequence)
    return sorted(shared.values(), key=lambda item: len(item[0]))


def plan_step(
    table: SlotTable, prefills: Sequence[tuple[IntArray, list[int]]], cache: KVCache, device: torch.device
) -> ForwardPlan:
    """One decode iteration of all active rows together with ``prefills``."""
    n = table.count
    rows = np.arange(n)
    length = table.length[:n]
    longest = int(length.max())
    attended = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, cache.capacity)
    bias = np.where(np.arange(attended) < length[:, None], np.float32(0), np.float32(-np.inf))
    ids, positions = [table.tokens[rows, length - 1]], [length - 1]
    source, target, place = [rows], [rows], [length - 1]
    packed = n
    for sequence, sharers in prefills:
        size = len(sequence)
        ids.append(sequence)
        positions.append(np.arange(size))
        source.append(np.tile(np.arange(packed, packed + size), len(sharers)))
        target.append(np.repeat(sharers, size))
        place.append(np.tile(np.arange(size), len(sharers)))
        packed += size
    shares = any(len(sharers) > 1 for _, sharers in prefills)
    return ForwardPlan(
        input_ids=_join(ids, device),
        positions=_join(positions, device),
        num_decode=n,
        num_logits=n,
        longest=longest,
        buckets=make_buckets([len(sequence) for sequence, _ in prefills], n, device),
        attended=attended,
        bias=torch.from_numpy(bias).to(device, cache.dtype)[:, None, None],
        write_source=_join(source, device) if shares else None,
        write_index=cache.flat_index(_join(target, device), _join(place, device)),
    )


def plan_score(texts: Sequence[IntArray], device: torch.device) -> ForwardPlan:
    """All logits of ``texts``, which come in ascending order of their lengths; nothing is cached."""
    lengths = [len(text) for text in texts]
    return ForwardPlan(
        input_ids=_join(list(texts), device),
        positions=_join([np.arange(length) for length in lengths], device),
        num_decode=0,
        num_logits=sum(lengths),
        longest=max(lengths),
        buckets=make_buckets(lengths, 0, device),
    )


def _join(arrays: Sequence[IntArray], device: torch.device) -> torch.Tensor:
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return torch.from_numpy(np.ascontiguousarray(whole, np.int64)).to(device)
