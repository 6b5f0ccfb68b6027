"""The KV cache of the hf engine: one row per slot; attention of decoding rows and of prefilled sequences over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from asyncrlhf.types import IntArray

LENGTH_MULTIPLE = 8  # attended lengths are rounded up to it: few shapes, and aligned masks for the kernels


@dataclass(frozen=True)
class PrefillBucket:
    """``count`` sequences of similar length, packed in ``start:stop`` of the forward pass's tokens.

    ``pad`` [count * width]: the packed token at each padded place, ``unpad`` [stop - start]: the reverse; both None
    when all lengths are equal.
    """

    start: int
    stop: int
    count: int
    pad: torch.Tensor | None
    unpad: torch.Tensor | None


@dataclass(frozen=True)
class ForwardPlan:
    """One forward pass over packed tokens [T]: first one token of each decoding row, then the prefilled sequences.

    Prefilled tokens only write keys and values; logits are computed for the first ``num_logits`` tokens. All tensors
    are on the model's device.
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    num_decode: int
    num_logits: int
    longest: int  # the largest position
    buckets: tuple[PrefillBucket, ...]
    attended: int = 0  # cache positions that decoding rows attend to
    bias: torch.Tensor | None = None  # [num_decode, 1, 1, attended] 0 or -inf
    write_source: torch.Tensor | None = None  # [W] token of each cache write; None: token w itself
    write_index: torch.Tensor | None = None  # [W * Hkv] flat places in the cache; None: nothing is written


class KVCache:
    """Keys and values [layers, 2, slots, Hkv, capacity, D]; ``capacity`` grows with the longest request.

    The batch's active rows are the first ones, so that attention reads a slice and never gathers.
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.kv_heads, self.head_dim = slots, kv_heads, head_dim
        self._data = torch.zeros((layers, 2, slots, kv_heads, 0, head_dim), dtype=dtype, device=device)
        self._heads = torch.arange(kv_heads, device=device)

    @property
    def capacity(self) -> int:
        return self._data.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self._data.dtype

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions in every row."""
        if length <= self.capacity:
            return
        capacity = -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        shape = list(self._data.shape)
        shape[4] = capacity
        # Zeros, not empty: a masked position that holds NaN would still poison the product with the values.
        data = torch.zeros(shape, dtype=self._data.dtype, device=self._data.device)
        data[:, :, :, :, : self.capacity] = self._data
        self._data = data

    def release(self) -> None:
        self._data = self._data[:, :, :, :, :0].clone()

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of rows ``source`` to rows ``target``."""
        src = torch.tensor(source, device=self._data.device)
        dst = torch.tensor(target, device=self._data.device)
        self._data[:, :, dst, :, :length] = self._data[:, :, src, :, :length]

    def flat_index(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat places [W * Hkv] of the positions [W] of rows [W], for :attr:`ForwardPlan.write_index`."""
        place = (rows[:, None] * self.kv_heads + self._heads) * self.capacity + positions[:, None]
        return place.flatten()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, plan: ForwardPlan
    ) -> torch.Tensor:
        """Write this layer's keys and values, then attend: query [T, H, D], key and value [T, Hkv, D] -> [T, H * D]."""
        if plan.write_index is not None:
            for kind, states in ((0, key), (1, value)):
                written = states if plan.write_source is None else states[plan.write_source]
                flat = self._data[layer, kind].view(-1, self.head_dim)
                flat.index_copy_(0, plan.write_index, written.reshape(-1, self.head_dim))
        parts = [self._decode(layer, query[: plan.num_decode], scale, plan)] if plan.num_decode else []
        for bucket in plan.buckets:
            part = slice(bucket.start, bucket.stop)
            parts.append(prefill_attention(query[part], key[part], value[part], scale, bucket))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, query: torch.Tensor, scale: float, plan: ForwardPlan) -> torch.Tensor:
        n, heads, dim = query.shape
        group = heads // self.kv_heads
        key = self._data[layer, 0, :n, :, : plan.attended]
        value = self._data[layer, 1, :n, :, : plan.attended]
        assert plan.bias is not None
        if group == 1 and query.device.type == "cpu" and query.dtype == torch.float32:
            # One query a head: two batched products are up to twice as fast as CPU's fused kernel, which pays per head.
            scores = torch.bmm(query.reshape(n * heads, 1, dim), key.flatten(0, 1).transpose(1, 2))
            scores = scores.view(n, heads, 1, plan.attended).mul_(scale).add_(plan.bias)
            weights = torch.softmax(scores, dim=-1).view(n * heads, 1, plan.attended)
            return torch.bmm(weights, value.flatten(0, 1)).view(n, heads * dim)
        # The heads of a group become queries of one key head: grouped attention without copies of the keys.
        grouped = query.reshape(n, self.kv_heads, group, dim)
        bias = plan.bias.expand(n, 1, group, plan.attended)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scale)
        return out.reshape(n, heads * dim)


def prefill_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bucket: PrefillBucket
) -> torch.Tensor:
    """Causal attention inside each sequence of a bucket: query [t, H, D], key and value [t, Hkv, D] -> [t, H * D].

    Sequences are padded on the right for this product alone; causality hides the padding from every real token.
    """
    heads, dim = query.shape[1:]
    group = heads // key.shape[1]

    def padded(states: torch.Tensor) -> torch.Tensor:
        rows = states if bucket.pad is None else states[bucket.pad]
        return rows.reshape(bucket.count, -1, states.shape[1], dim).transpose(1, 2)

    k, v = padded(key), padded(value)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = F.scaled_dot_product_attention(padded(query), k, v, is_causal=True, scale=scale)
    out = out.transpose(1, 2).reshape(-1, heads * dim)
    return out if bucket.unpad is None else out[bucket.unpad]


def make_buckets(lengths: Sequence[int], start: int, device: torch.device) -> tuple[PrefillBucket, ...]:
    """Buckets of sequences that are packed from token ``start`` in ascending order of ``lengths``.

    A sequence opens a new bucket when it is over twice as long as the first of the present one, so that ragged
    prompts pad little.
    """
    buckets: list[PrefillBucket] = []
    first = 0
    for i in range(1, len(lengths) + 1):
        if i < len(lengths) and lengths[i] <= 2 * lengths[first] + LENGTH_MULTIPLE:
            continue
        members = np.asarray(lengths[first:i], np.int64)
        buckets.append(_bucket(members, start, device))
        start += int(members.sum())
        first = i
    return tuple(buckets)


def _bucket(lengths: IntArray, start: int, device: torch.device) -> PrefillBucket:
    stop = start + int(lengths.sum())
    width = int(lengths.max())
    if int(lengths.min()) == width:
        return PrefillBucket(start, stop, len(lengths), None, None)
    real: NDArray[np.bool_] = np.arange(width) < lengths[:, None]
    unpad = np.flatnonzero(real)
    pad = np.zeros(real.size, np.int64)
    pad[unpad] = np.arange(stop - start)
    return PrefillBucket(
        start, stop, len(lengths), torch.from_numpy(pad).to(device), torch.from_numpy(unpad).to(device)
    )
