"""Attention of the hf engine: of decoding rows over their cached keys, and of prefilled sequences over their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from asyncrlhf.types import IntArray

LENGTH_MULTIPLE = 8  # attended lengths are rounded up to it: few shapes, and aligned masks for the kernels
QUERY_BLOCK = 256  # queries of a prefilled sequence whose masks and scores are in memory at the same time


@dataclass(frozen=True)
class Scoring:
    """How an attention layer turns products of queries and keys into weights."""

    scale: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [H] a further score of each head, whose weight goes to no value

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernels compute it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class PrefillBucket:
    """``count`` sequences of similar length, packed in ``start:stop`` of the forward pass's tokens.

    ``pad`` [count * width]: the packed token at each padded place, ``unpad`` [stop - start]: the reverse; both None
    when all lengths are equal. ``row``: of the cache, whose evictions hide earlier tokens of this one sequence.
    """

    start: int
    stop: int
    count: int
    pad: torch.Tensor | None
    unpad: torch.Tensor | None
    row: int | None = None


def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """One query a row: query [n, H, D], key [n, Hkv, A, D], value [n, Hkv, A, Dv], bias [n, 1, 1, A] -> [n, H * Dv]."""
    n, heads, dim = query.shape
    kv_heads, attended = key.shape[1:3]
    group = heads // kv_heads
    if not scoring.is_plain:
        grouped = query.reshape(n, kv_heads, group, dim)
        return _explicit_attention(grouped, key, value, bias, scoring).reshape(n, -1)
    if group == 1 and query.device.type == "cpu" and query.dtype == torch.float32:
        # One query a head: two batched products are up to twice as fast as CPU's fused kernel, which pays per head.
        scores = torch.bmm(query.reshape(n * heads, 1, dim), key.flatten(0, 1).transpose(1, 2))
        scores = scores.view(n, heads, 1, attended).mul_(scoring.scale).add_(bias)
        weights = torch.softmax(scores, dim=-1).view(n * heads, 1, attended)
        return torch.bmm(weights, value.flatten(0, 1)).view(n, -1)
    # The heads of a group become queries of one key head: grouped attention without copies of the keys.
    grouped = query.reshape(n, kv_heads, group, dim)
    bias = bias.expand(n, 1, group, attended)
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scoring.scale).reshape(n, -1)


def decode_and_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`decode_attention`, with the weights [n, Hkv, A] that the heads of each group give together."""
    n, heads, dim = query.shape
    grouped = query.reshape(n, key.shape[1], heads // key.shape[1], dim)
    scores = _scored(grouped, key, bias, scoring)
    weights = torch.softmax(scores, dim=-1)
    if scoring.sinks is not None:
        weights = weights * _beside_sinks(scores, scoring.sinks)
    return torch.matmul(weights.to(value.dtype), value).reshape(n, -1), weights.sum(dim=2)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    window: int | None,
    bucket: PrefillBucket,
    gone: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each sequence of a bucket, of each token over the last ``window`` ones with itself:
    query [t, H, D], key [t, Hkv, D], value [t, Hkv, Dv] -> [t, H * Dv]. ``gone`` [Hkv, t]: of a bucket of one sequence,
    the first query that does not see each key any more.

    Sequences are padded on the right for this product alone; causality hides the padding from every real token.
    """
    group = query.shape[1] // key.shape[1]

    def padded(states: torch.Tensor) -> torch.Tensor:
        rows = states if bucket.pad is None else states[bucket.pad]
        return rows.reshape(bucket.count, -1, *states.shape[1:]).transpose(1, 2)

    q, k, v = padded(query), padded(key), padded(value)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        gone = None if gone is None else gone.repeat_interleave(group, dim=0)
    if gone is None and scoring.is_plain and (window is None or window >= q.shape[2]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale)
    else:
        out = _blocked_attention(q, k, v, scoring, window, gone)
    out = out.transpose(1, 2).reshape(-1, query.shape[1] * value.shape[2])
    return out if bucket.unpad is None else out[bucket.unpad]


def _blocked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, window: int | None,
    gone: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """As :func:`prefill_attention` of padded sequences [count, H, width, D], a block of queries at a time: each over
    the keys that one of its queries sees. ``gone`` [H, width]."""
    width = query.shape[2]
    position = torch.arange(width, device=query.device)
    parts = []
    for start in range(0, width, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, width)
        first = 0 if window is None else max(0, start - window + 1)
        age = position[start:stop, None] - position[first:stop]
        sees = (age >= 0) if window is None else (age >= 0) & (age < window)
        if gone is not None:
            sees = sees & (gone[:, None, first:stop] > position[start:stop, None])
        q, k, v = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
        if scoring.is_plain:
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scoring.scale))
        else:
            bias = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill_(~sees, -torch.inf)
            parts.append(_explicit_attention(q, k, v, bias, scoring))
    return torch.cat(parts, dim=2)


def _explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attention with a soft cap or sinks: query [B, h, Q, D], key [B, h, A, D], value [B, h, A, Dv], ``bias`` broadcast
    to the scores [B, h, Q, A] -> [B, h, Q, Dv]. The sinks' heads are either h, or h times Q if Q are a group's heads.
    """
    scores = _scored(query, key, bias, scoring)
    out = torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)
    if scoring.sinks is not None:
        out = out * _beside_sinks(scores, scoring.sinks).to(out.dtype)
    return out


def _scored(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """The scores [B, h, Q, A] of :func:`_explicit_attention`, at least in float32."""
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2)).to(precise) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    return scores + bias


def _beside_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The share [B, h, Q, 1] of the weights that a further term exp(sink) in the denominator leaves: Z / (Z +
    exp(sink))."""
    return torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - sinks.to(scores.dtype).view(scores.shape[1], -1, 1))


def make_buckets(lengths: Sequence[int], start: int) -> tuple[PrefillBucket, ...]:
    """Buckets, on the host, of sequences that are packed from token ``start`` in ascending order of ``lengths``.

    A sequence opens a new bucket when it is over twice as long as the first of the present one, so that ragged
    prompts pad little.
    """
    buckets: list[PrefillBucket] = []
    first = 0
    for i in range(1, len(lengths) + 1):
        if i < len(lengths) and lengths[i] <= 2 * lengths[first] + LENGTH_MULTIPLE:
            continue
        members = np.asarray(lengths[first:i], np.int64)
        buckets.append(_bucket(members, start))
        start += int(members.sum())
        first = i
    return tuple(buckets)


def _bucket(lengths: IntArray, start: int) -> PrefillBucket:
    stop = start + int(lengths.sum())
    width = int(lengths.max())
    if int(lengths.min()) == width:
        return PrefillBucket(start, stop, len(lengths), None, None)
    real: NDArray[np.bool_] = np.arange(width) < lengths[:, None]
    unpad = np.flatnonzero(real)
    pad = np.zeros(real.size, np.int64)
    pad[unpad] = np.arange(stop - start)
    return PrefillBucket(start, stop, len(lengths), torch.from_numpy(pad), torch.from_numpy(unpad))
