"""Sampling: counter-based uniforms, and one draw per row from logits with temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrlhf.errors import AsyncRLHFError

UIntArray = NDArray[np.uint64]
DoubleArray = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
MAX_KEPT = 1024  # most tokens that truncated sampling keeps: part of the sampler, so that kept sets can be reported
_CDF_BLOCK = 256


class Draws(NamedTuple):
    """One token for each of n rows, and the kept sets of truncated rows: K tokens in total."""

    tokens: torch.Tensor  # [n] int64
    logprobs: torch.Tensor  # [n] float32, of the distribution that was sampled
    kept_ids: torch.Tensor  # [K] int64, row by row
    kept_counts: torch.Tensor  # [n] int64; 0: the whole vocabulary


def _mix(x: UIntArray) -> UIntArray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def seed_state(seed: int) -> np.uint64:
    """The start of a request's stream; mixed, so that the streams of neighbouring seeds do not overlap."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN)[0]


def uniforms(states: UIntArray, counters: NDArray[np.int64]) -> DoubleArray:
    """Draw ``counters[i]`` of the stream ``states[i]``: [n] numbers inside (0, 1), which depend only on these two."""
    bits = _mix(states + _GOLDEN * (counters.astype(np.uint64) + np.uint64(1)))
    # 48 bits: u * total stays below total in double precision, so that a draw never exceeds the range.
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _keep(
    logits: torch.Tensor, top_p: DoubleArray, top_k: NDArray[np.int64], min_p: DoubleArray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of n truncated rows, most likely first: ids [n, W], logits [n, W], and which are kept [n, W].

    Every filter keeps the first few tokens in the order of their logits, so no others are needed.
    """
    device = logits.device
    most = min(MAX_KEPT, logits.shape[-1])
    k = np.where(top_k > 0, np.minimum(top_k, most), most)
    values, ids = logits.topk(int(k.max()), dim=-1)
    kept = torch.arange(values.shape[1], device=device) < _column(k, device)
    weights = (values - values[:, :1]).double().exp()
    if top_p.min() < 1.0:
        whole = (logits - values[:, :1]).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
        among = (weights * kept).sum(dim=-1, keepdim=True)
        total = torch.where(_column(top_k > 0, device), among, whole)
        limit = _column(top_p, device)
        kept &= (weights.cumsum(dim=-1) - weights < limit * total) | (limit >= 1.0)
    kept &= weights >= _column(min_p, device)
    kept[:, 0] = True
    return ids, values, kept


def _column(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)[:, None]


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token [n, 1] at which the running sum of ``weights`` [n, V] exceeds ``uniform`` [n, 1] times their total.

    In a large vocabulary it finds the block first, then the token in it: running sums over all tokens in double
    precision would take longer than a small model's output layer.
    """
    vocabulary = weights.shape[-1]
    if vocabulary <= 4 * _CDF_BLOCK:
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % _CDF_BLOCK))
    blocks = padded.view(len(weights), -1, _CDF_BLOCK)
    mass = blocks.sum(dim=-1).double()
    cdf = mass.cumsum(dim=-1)
    target = uniform * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True)
    hit = mass.gather(1, block)
    # Where in its block the target lies; below one, so that it falls on a token of positive weight.
    inside = ((target - cdf.gather(1, block) + hit) / hit).clamp(0.0, 1 - 2.0**-48)
    chosen = blocks.gather(1, block[..., None].expand(-1, 1, _CDF_BLOCK))[:, 0]
    return block * _CDF_BLOCK + _inverse_cdf(chosen, inside)


def sample_tokens(
    logits: torch.Tensor,
    uniform: DoubleArray,
    temperature: DoubleArray,
    top_p: DoubleArray,
    top_k: NDArray[np.int64],
    min_p: DoubleArray,
) -> Draws:
    """One token per row by the inverse CDF of the distribution that the row's settings make of ``logits`` [n, V].

    The logits are divided by ``temperature``; ``top_k`` keeps the k largest; ``top_p`` keeps, of these, the largest
    until their sum of probabilities reaches it; ``min_p`` drops tokens with less than that fraction of the largest
    probability. At least one and at most ``MAX_KEPT`` tokens are kept in a truncated row; of tokens that tie at the
    limit as many as fit. The kept tokens are renormalised. ``top_k=0``, ``top_p=1`` and ``min_p=0`` are off. The
    settings and ``uniform`` are [n]. A greedy row (``temperature=0``) takes the argmax, with its log-prob at
    temperature 1 and no filter: a point mass has no useful one. Raises AsyncRLHFError for logits that are not finite
    in a row without filters.
    """
    logits, plain = logits.float(), logits
    sampled = temperature > 0
    if np.any(sampled & (temperature != 1.0)):
        divisor = np.where(sampled, temperature, 1.0).astype(np.float32)
        logits = logits / torch.from_numpy(divisor).to(logits.device)[:, None]
    # Rows in which a filter is on; a greedy row has none.
    truncated = sampled & (((top_k > 0) & (top_k < logits.shape[-1])) | (top_p < 1) | (min_p > 0))
    if truncated.all():
        return _draw_truncated(logits, uniform, top_p, top_k, min_p)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _inverse_cdf(logprobs.exp(), _column(uniform, logits.device)).clamp(max=logits.shape[-1] - 1)
    if not sampled.all():
        tokens = torch.where(_column(sampled, logits.device), tokens, plain.argmax(dim=-1, keepdim=True))
    found, counts = logprobs.gather(1, tokens)[:, 0], torch.zeros_like(tokens[:, 0])
    if not torch.isfinite(found).all():
        raise AsyncRLHFError(
            "The model's logits are not finite, so that no token can be sampled: its weights are broken."
        )
    if not truncated.any():
        return Draws(tokens[:, 0], found, tokens.new_empty(0), counts)
    rows = np.flatnonzero(truncated)
    where = torch.from_numpy(rows).to(logits.device)
    part = _draw_truncated(logits[where], uniform[rows], top_p[rows], top_k[rows], min_p[rows])
    return Draws(
        tokens[:, 0].index_copy(0, where, part.tokens),
        found.index_copy(0, where, part.logprobs),
        part.kept_ids,
        counts.index_copy(0, where, part.kept_counts),
    )


def penalise_repetition(logits: torch.Tensor, texts: Sequence[NDArray[np.int64]], penalty: DoubleArray) -> torch.Tensor:
    """``logits`` [n, V] with those of the tokens in each row's text reduced, as in CTRL (1909.05858, section 4.1):
    positive ones divided by the row's ``penalty`` [n], negative ones multiplied."""
    logits = logits.float().clone()
    for row in np.flatnonzero(penalty != 1.0).tolist():
        seen = torch.from_numpy(np.unique(texts[row])).to(logits.device)
        factor, found = float(penalty[row]), logits[row, seen]
        logits[row, seen] = torch.where(found > 0, found / factor, found * factor)
    return logits


def _draw_truncated(
    logits: torch.Tensor, uniform: DoubleArray, top_p: DoubleArray, top_k: NDArray[np.int64], min_p: DoubleArray
) -> Draws:
    ids, values, kept = _keep(logits, top_p, top_k, min_p)
    logprobs = values.masked_fill(~kept, float("-inf")).log_softmax(dim=-1)
    place = _inverse_cdf(logprobs.exp(), _column(uniform, logits.device))
    return Draws(ids.gather(1, place)[:, 0], logprobs.gather(1, place)[:, 0], ids[kept], kept.sum(dim=-1))
