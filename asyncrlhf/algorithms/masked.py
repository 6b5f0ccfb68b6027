"""Masked and per-sequence reductions on the packed layout.

Shapes in this folder: T packed tokens, N sequences, V vocabulary. ``sequence_ids [T]`` (int64) says which sequence a
token belongs to: sorted, 0 to N-1 within whatever is passed in, no sequence empty. ``mask [T]`` (bool) says which
tokens count; values outside it, NaN and infinities included, never change a result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_values(x: Tensor, mask: Tensor) -> Tensor:
    """``x [T]`` with zero outside ``mask``: a selection, so that NaN outside stays outside, also in the gradient."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def segment_sum(x: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Sum of ``x [T]`` over each sequence: [N]."""
    return x.new_zeros(num_sequences).index_add(0, sequence_ids, x)


def segment_total(x: Tensor, sequence_ids: Tensor) -> Tensor:
    """Each token's sequence sum of ``x [T]``: [T]. In T slots: counting sequences would wait for the device."""
    return segment_sum(x, sequence_ids, len(x))[sequence_ids]


def sequence_lengths(mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Masked tokens of each token's sequence, at least 1 so that it can divide: [T] int64."""
    return segment_total(mask.long(), sequence_ids).clamp(min=1)


def group_reduce(x: Tensor, group_ids: Tensor, how: str) -> Tensor:
    """Each rollout's group's ``sum``, ``mean``, ``amax`` or ``amin`` of ``x [N]``: [N]. Groups may be ragged."""
    _, index = torch.unique(group_ids, return_inverse=True)
    return torch.zeros_like(x).scatter_reduce(0, index, x, how, include_self=False)[index]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` over ``mask``; 0 where nothing is masked in. 0-dim."""
    return masked_values(x, mask).sum() / mask.sum().clamp(min=1)


def percentile(x: Tensor, share: float) -> Tensor:
    """The smallest entry of ``x [n]``, n >= 1, that at least ``share`` of its entries do not exceed: 0-dim."""
    # Without a full sort; torch.quantile refuses more than 2^24 numbers. Rounded first: 0.95 * 20 is above 19.
    rank = math.ceil(round(share * len(x), 6))
    return x.kthvalue(min(len(x), max(1, rank))).values


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of ``x`` over ``mask``: [3] float64. Add them over microbatches and ranks."""
    kept = masked_values(x.detach(), mask).double()
    return torch.stack((mask.sum().double(), kept.sum(), kept.square().sum()))


def whiten(x: Tensor, mask: Tensor, total: Tensor | None = None, *, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over ``mask`` (variance with ddof 1); 0 outside: [T].

    ``total [3]`` holds the ``moments`` of the whole step, summed over ranks; without it, ``x`` is the whole step.
    """
    count, first, second = (moments(x, mask) if total is None else total).unbind()
    mean = first / count.clamp(min=1)
    variance = ((second - count * mean.square()) / (count - 1).clamp(min=1)).clamp(min=0)
    return masked_values(((x.double() - mean) * (variance + eps).rsqrt()).to(x.dtype), mask)
