"""Attention over packed sequences: every op of the model runs on [1, T] without padding, only the inner product pads.

The function is registered with transformers under ``IMPLEMENTATION``; a model switched to it by
``use_packed_attention`` must be called with ``packed_layout=PackedLayout(...)`` and position ids that restart at every
sequence. transformers builds no mask for names that it does not know, so causality and the borders between sequences
come from the layout alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from asyncrlhf.errors import ConfigError
from asyncrlhf.types import IntArray

IMPLEMENTATION = "asyncrlhf_packed"

# torch's half-precision CPU attention takes 6 times as long as float32's for 40 tokens, twice for 128, less from 256.
HALF_FROM = 192


@dataclass(frozen=True)
class PackedLayout:
    """Where each of T packed tokens lies in a padded [N, longest] grid; siblings may share their prompt's tokens.

    A shared prompt is packed once, with the first sequence that has it; its keys and values serve all of them, and
    their gradients are added up. ``slots`` and ``tokens`` are None when grid and packing are the same.
    """

    count: int  # N
    longest: int
    position_ids: torch.Tensor  # [1, T]
    slots: torch.Tensor | None = None  # [T] flat grid position of each packed token
    tokens: torch.Tensor | None = None  # [N * longest] packed token of each grid position; padding repeats a row's last
    copied_slots: torch.Tensor | None = None  # [C] grid positions of prompt tokens that lie with another sequence
    copied_tokens: torch.Tensor | None = None  # [C] their packed tokens

    @classmethod
    def build(
        cls, lengths: IntArray, prompts: IntArray, owners: IntArray, device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """The layout of sequences of ``lengths`` [N] tokens, each at least 1.

        The first ``prompts`` [N] tokens of sequence i are those of sequence ``owners[i]``, which may be i itself.
        """
        count, longest = len(lengths), int(lengths.max())
        own = owners == np.arange(count)
        elsewhere = np.where(own, 0, prompts)  # tokens of each sequence that are packed with another one
        starts = np.cumsum(lengths - elsewhere) - (lengths - elsewhere)
        columns = np.arange(longest)[None, :]
        packed = (columns >= elsewhere[:, None]) & (columns < lengths[:, None])  # [N, longest]
        positions = np.broadcast_to(columns, packed.shape)[packed]

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        if packed.all():
            return cls(count, longest, tensor(positions[None]))
        column = np.minimum(columns, lengths[:, None] - 1)
        copied = column < elsewhere[:, None]
        tokens = np.where(copied, starts[owners][:, None] + column, (starts - elsewhere)[:, None] + column).reshape(-1)
        copies = np.flatnonzero(copied)
        return cls(
            count=count,
            longest=longest,
            position_ids=tensor(positions[None]),
            slots=tensor(np.flatnonzero(packed)),
            tokens=tensor(tokens),
            copied_slots=tensor(copies) if len(copies) else None,
            copied_tokens=tensor(tokens[copies]) if len(copies) else None,
        )

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
    ) -> tuple[torch.Tensor, None]:
        """As :func:`packed_attention`; a layout of some packed tokens only overrides this."""
        rows = [x.transpose(1, 2)[0] for x in (query, key, value)]  # [T, heads, D]
        if self.slots is not None:
            grid = (self.tokens, self.slots, self.copied_slots, self.copied_tokens)
            rows = [_Pad.apply(x, *grid) for x in rows]
        q, k, v = (x.view(self.count, self.longest, *x.shape[1:]).transpose(1, 2) for x in rows)
        out = _attend(q, k, v, scaling, sliding_window)
        out = out.transpose(1, 2).reshape(self.count * self.longest, *out.shape[1::2])  # [N * longest, heads, D]
        return (out if self.slots is None else _Unpad.apply(out, self.slots))[None], None


class _Pad(torch.autograd.Function):
    """[T, ...] to [N * longest, ...]: a gather whose gradient is one too, as causal attention sends none to padding.

    Autograd's own gradient of a gather is a scatter-add, several times slower on CPUs; only shared prompts need one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        copied_slots: torch.Tensor | None,
        copied_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(slots, copied_slots, copied_tokens)
        return packed.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slots, copied_slots, copied_tokens = ctx.saved_tensors
        packed = grads[0].index_select(0, slots)
        if copied_slots is not None:
            packed.index_add_(0, copied_tokens, grads[0].index_select(0, copied_slots))
        return packed, None, None, None, None


class _Unpad(torch.autograd.Function):
    """[N * longest, ...] to [T, ...]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        padded = grads[0].new_zeros((ctx.rows, *grads[0].shape[1:]))
        return padded.index_copy_(0, slots, grads[0]), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence.

    ``query`` [1, heads, T, D], ``key`` and ``value`` [1, kv_heads, T, D]; returns ([1, T, heads, D], None). Dropout is
    ignored: a policy gradient needs the log-probs of the policy that is published.
    """
    if packed_layout is None:
        raise ValueError(f"a model with {IMPLEMENTATION} attention was called without packed_layout")
    if softcap is not None or s_aux is not None:
        raise ConfigError("model.path: attention with soft capping or attention sinks cannot be trained packed.")
    window = {} if sliding_window is None else {"sliding_window": sliding_window}
    return packed_layout.attend(module, query, key, value, scaling=scaling, **window)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention over the grid: [N, heads, longest, D], in the type of ``q``.

    Short rows in half precision are computed in float32 on a CPU, see ``HALF_FROM``.
    """
    longest, mask = q.shape[2], None
    if window is not None and window < longest:
        steps = torch.arange(longest, device=q.device)
        distance = steps[:, None] - steps[None, :]
        mask = (distance >= 0) & (distance < window)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )

    if q.device.type != "cpu" or v.dtype.itemsize > 2 or longest >= HALF_FROM:
        return attend(q, k, v)
    with torch.autocast("cpu", enabled=False):
        return attend(q.float(), k.float(), v.float()).to(v.dtype)


def use_packed_attention(model: transformers.PreTrainedModel) -> None:
    """Switch ``model`` to packed attention in place; raises ConfigError when its family cannot."""
    transformers.AttentionInterface.register(IMPLEMENTATION, packed_attention)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model.path: {type(model).__name__} cannot be trained packed; "
            "allowed: decoder-only models that use transformers' attention interface (Llama, GPT-NeoX, Qwen, ...)."
        )
    model.set_attn_implementation(IMPLEMENTATION)
