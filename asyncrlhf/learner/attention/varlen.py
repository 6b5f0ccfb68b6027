"""Attention over sequences of different lengths without padding: by calls of torch's attention, on GPUs by its varlen
kernel.

On a CPU each sequence is a separate call on a slice of the packed tensors. Only short sequences share a call, if
padding costs less than another call; ``plan_calls`` decides. A prompt that siblings share is attended once for all
their responses, and both parts of a row are merged by their log-sum-exps, as flash attention does with blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from asyncrlhf.types import IntArray

# Pairs of query and key that cost as much as one more call: measured, see experiments/25_no_padding.
CALL = 512
# From this many tokens on a sequence is a separate call: gathering its rows costs more than the call.
ALONE = 128
# torch's half-precision CPU attention takes 6 times as long as float32's for 40 tokens, twice for 128, less from 256.
HALF_FROM = 192
CAUSAL_FROM_THE_END = 2  # torch's number of the mask under which the last query sees the last key

flash_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_op_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Causal:
    """Causal attention of ``count`` sequences, padded to ``longest``: all of their rows, or one slice of them."""

    count: int
    longest: int
    first: int = 0  # without ``rows``, the sequence's first packed row
    rows: torch.Tensor | None = None  # [count * longest] packed rows; padding repeats a sequence's last
    kept: torch.Tensor | None = None  # which of them are the sequences' own, and
    own: torch.Tensor | None = None  # their packed rows
    copies: torch.Tensor | None = None  # which of them belong to a prompt that is packed with another sequence


@dataclass(frozen=True)
class Prefix:
    """Attention of a slice of rows to a whole prompt that is packed elsewhere."""

    first: int
    length: int
    prompt: int
    prompt_length: int


Calls = tuple[tuple[Causal, ...], tuple[Prefix, ...]]


def plan_calls(spans: IntArray) -> Calls:
    """The calls of N packed sequences.

    ``spans`` [N, 4]: the first row and the number of each one's own rows, and the same of its prompt if that is packed
    with another sequence, else zeros. Every row belongs to one sequence.
    """
    rows: list[tuple[int, int, int, int]] = []  # the spans of sequences with a row of their own
    prefixes: list[Prefix] = []
    for first, length, prompt, shared in _shared_once(spans, prefixes):
        if length:
            rows.append((first, length, prompt, shared))
    rows.sort(key=lambda span: -(span[1] + span[3]))
    causal: list[Causal] = []
    group: list[tuple[int, int, int, int]] = []
    longest = waste = 0
    for span in rows:
        tokens = span[1] + span[3]
        waste += (longest**2 - tokens**2) // 2
        if group and (longest > ALONE or waste > CALL):
            causal.append(_causal(group))
            group = []
        if not group:
            longest, waste = tokens, 0
        group.append(span)
    if group:
        causal.append(_causal(group))
    return tuple(causal), tuple(prefixes)


def _shared_once(spans: IntArray, prefixes: list[Prefix]) -> list[tuple[int, int, int, int]]:
    """The spans without the prompts for which a separate call is cheaper than copies: those are added to ``prefixes``,
    once for neighbours that share one."""
    left: list[tuple[int, int, int, int]] = []
    run: list[tuple[int, int, int, int]] = []

    def end() -> None:
        if not run:
            return
        shared = run[0][3]
        rows = sum(span[1] for span in run)
        if len(run) * shared**2 // 2 <= CALL and max(span[1] for span in run) + shared <= ALONE:
            left.extend(run)
        else:
            left.extend((first, length, 0, 0) for first, length, _, _ in run)
            if rows:
                prefixes.append(Prefix(run[0][0], rows, run[0][2], shared))
        run.clear()

    for first, length, prompt, shared in spans.tolist():
        here = (first, length, prompt, shared)
        if run and here[2:] != run[0][2:]:
            end()
        (run if shared else left).append(here)
    end()
    return left


def _causal(group: list[tuple[int, int, int, int]]) -> Causal:
    (first, length, _, shared), count = group[0], len(group)
    longest = length + shared
    if count == 1 and not shared:
        return Causal(1, longest, first)
    spans = np.array(group)[:, :, None]
    columns = np.arange(longest)
    tokens = spans[:, 1] + spans[:, 3]
    place = np.minimum(columns, tokens - 1)
    copied = place < spans[:, 3]
    rows = np.where(copied, spans[:, 2] + place, spans[:, 0] + place - spans[:, 3]).reshape(-1)
    kept = np.flatnonzero((columns >= spans[:, 3]) & (columns < tokens))
    copies = np.flatnonzero(copied)
    return Causal(
        count,
        longest,
        rows=torch.from_numpy(rows),
        kept=torch.from_numpy(kept),
        own=torch.from_numpy(rows[kept]),
        copies=torch.from_numpy(copies) if len(copies) else None,
    )


@lru_cache(maxsize=64)
def _calls(spans: bytes) -> Calls:
    return plan_calls(np.frombuffer(spans, dtype=np.int64).reshape(-1, 4))


class _Grid:
    """The rows of a call as the kernel takes them, [count, heads, longest, ...]; packed ones are [heads, T, ...]."""

    def __init__(self, call: Causal) -> None:
        self.call = call

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        call = self.call
        if call.rows is None:
            return rows[None, :, call.first : call.first + call.longest]
        return self._laid(rows.transpose(0, 1).index_select(0, call.rows))

    def take_gradient(self, rows: torch.Tensor) -> torch.Tensor:
        """As :meth:`take`, and zero where the row is padding or a copy."""
        call = self.call
        if call.kept is None or call.own is None:
            return self.take(rows)
        grid = rows.new_zeros((call.count * call.longest, len(rows), *rows.shape[2:]))
        return self._laid(grid.index_copy_(0, call.kept, rows.transpose(0, 1).index_select(0, call.own)))

    def put(self, target: torch.Tensor, grid: torch.Tensor) -> None:
        """The sequences' own rows into packed ones."""
        call = self.call
        if call.kept is None or call.own is None:
            target[:, call.first : call.first + call.longest] = grid[0]
        else:
            found = self._flat(grid).index_select(0, call.kept).to(target.dtype)
            target.transpose(0, 1).index_copy_(0, call.own, found)

    def add_copies(self, target: torch.Tensor, grid: torch.Tensor) -> None:
        """Add the gradients of prompts that are packed with other sequences to their packed rows."""
        call = self.call
        if call.copies is not None and call.rows is not None:
            found = self._flat(grid).index_select(0, call.copies).to(target.dtype)
            target.transpose(0, 1).index_add_(0, call.rows[call.copies], found)

    def _laid(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (self.call.count, self.call.longest)).transpose(1, 2)

    def _flat(self, grid: torch.Tensor) -> torch.Tensor:
        return grid.transpose(1, 2).flatten(0, 1)


def kernel_type(value: torch.Tensor, longest: int) -> torch.dtype:
    return torch.float32 if value.dtype.itemsize <= 2 and longest < HALF_FROM else value.dtype


@torch.library.custom_op("asyncrlhf::packed_attention", mutates_args=())
def attention_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """([1, T, heads, D] in the type of ``value``, log-sum-exps [heads, T])."""
    causal, prefixes = _calls(spans.numpy().tobytes())
    q, k, v = query[0], key[0], value[0]  # [heads, T, D]
    result = value.new_empty((1, q.shape[1], len(q), v.shape[2]))
    out = result[0].transpose(0, 1)
    lse = torch.empty(q.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    for call in causal:
        grid, kind = _Grid(call), kernel_type(v, call.longest)
        parts = (grid.take(x).to(kind) for x in (q, k, v))
        found, sums = flash_op(*parts, 0.0, True, scale=scale)
        grid.put(out, found)
        grid.put(lse, sums)
    for prefix in prefixes:
        mine, theirs = _slices(prefix)
        kind = kernel_type(v, prefix.length)
        parts = (x[None].to(kind) for x in (q[:, mine], k[:, theirs], v[:, theirs]))
        found, sums = (x[0] for x in flash_op(*parts, 0.0, False, scale=scale))
        before, both = lse[:, mine], torch.logaddexp(lse[:, mine], sums)
        kept, added = (before - both).exp_()[..., None], (sums - both).exp_()[..., None]
        out[:, mine] = out[:, mine] * kept + found * added
        lse[:, mine] = both
    return result, lse


@attention_op.register_fake
def _(query: Any, key: Any, value: Any, spans: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, tokens, _ = query.shape
    kind = torch.promote_types(value.dtype, torch.float32)
    return value.new_empty((1, tokens, heads, value.shape[3])), value.new_empty((heads, tokens), dtype=kind)


@torch.library.custom_op("asyncrlhf::packed_attention_backward", mutates_args=())
def attention_op_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    causal, prefixes = _calls(spans.numpy().tobytes())
    wanted = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    q, k, v = query[0], key[0], value[0]
    dq, dk, dv = (x[0] for x in wanted)
    out, dout = (x[0].transpose(0, 1) for x in (result, grad))
    copied: list[tuple[_Grid, torch.Tensor, torch.Tensor]] = []
    for call in causal:
        grid, kind = _Grid(call), kernel_type(v, call.longest)
        laid = (grid.take_gradient(dout), *(grid.take(x) for x in (q, k, v, out)))
        found = flash_op_backward(*(x.to(kind) for x in laid), grid.take(lse), 0.0, True, scale=scale)
        for target, gradient in zip((dq, dk, dv), found, strict=True):
            grid.put(target, gradient)
        if call.copies is not None:
            copied.append((grid, found[1], found[2]))
    for grid, for_keys, for_values in copied:  # once every row's own part is there
        grid.add_copies(dk, for_keys)
        grid.add_copies(dv, for_values)
    for prefix in prefixes:
        mine, theirs = _slices(prefix)
        kind = kernel_type(v, prefix.length)
        parts = (x[None].to(kind) for x in (dout[:, mine], q[:, mine], k[:, theirs], v[:, theirs], out[:, mine]))
        # Over all keys that a row saw: its output and log-sum-exp cover both parts.
        found = flash_op_backward(*parts, lse[None, :, mine], 0.0, False, scale=scale)
        for target, where, gradient in zip((dq, dk, dv), (mine, theirs, theirs), found, strict=True):
            target[:, where] += gradient[0]
    return wanted


@attention_op_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, spans, result, lse = ctx.saved_tensors
    return (*attention_op_backward(grad, query, key, value, result, lse, spans, ctx.scale), None, None)


attention_op.register_autograd(_backward, setup_context=_keep)


def _slices(prefix: Prefix) -> tuple[slice, slice]:
    first, prompt = prefix.first, prefix.prompt
    return slice(first, first + prefix.length), slice(prompt, prompt + prefix.prompt_length)


def flash_calls(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] on a CPU -> [1, T, heads, D]; ``spans`` [N, 4] as in
    :func:`plan_calls`."""
    return attention_op(query, key, value, spans, scale)[0]


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here, a second of each process
def masked_calls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[list[int], list[int]],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """As :func:`varlen_kernel`, by one call of torch's attention per sequence: for sliding windows on CPUs, and for
    float64 on GPUs. ``lengths``: queries and keys of each sequence."""
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (key, value))
    queries, every = lengths
    parts = []
    for q, k, v in zip(query.split(queries, 2), keys.split(every, 2), values.split(every, 2), strict=True):
        many, seen = k.shape[2], None
        if not q.shape[2]:
            continue
        if q.shape[2] != many or (window is not None and window < many):
            places = torch.arange(many, device=q.device)
            distance = places[many - q.shape[2] :, None] - places
            seen = (distance >= 0) & (distance < (window or many))
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale))
    return torch.cat(parts, 2).transpose(1, 2).contiguous()  # some models take a view of it


def varlen_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's varlen kernel computes heads of this type and size (``mha_varlen_fwd`` in its flash_api.cpp)."""
    size, half = query.shape[-1], value.dtype in (torch.bfloat16, torch.float16)
    return half and size % 8 == 0 and size <= 256 and size == value.shape[-1]


@lru_cache(maxsize=8)
def _has_groups(kernel: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


def _takes_groups() -> bool:
    from torch.nn.attention import varlen

    return _has_groups(varlen.varlen_attn)


# torch's compiler calls it once and takes the result as a constant: it would warn of the cache, which it looks through.
# This is what torch.compiler.assume_constant_result does, which would import the compiler here.
_takes_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]


def grouped_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(key, value, further arguments) for ``varlen_attn`` [T, heads, D]: before torch 2.12 it does not take fewer heads
    of keys than of queries, which are therefore repeated."""
    group = query.shape[1] // key.shape[1]
    if _takes_groups():
        return key, value, {"enable_gqa": group > 1}
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    return key, value, {}


def varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """As :func:`flash_calls`, by ``torch.nn.attention.varlen`` on a GPU in half precision.

    key and value hold every sequence's keys, copies of shared prompts included; ``bounds`` are cumulative counts of
    queries and of keys [N+1] int32 and the maximum of each. The last query of a sequence sees its last key.
    """
    from torch.nn.attention import varlen

    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    seen = (-1, 0) if window is None else (window - 1, 0)
    k, v, more = grouped_heads(q, k, v)
    out: Any = varlen.varlen_attn(q, k, v, *bounds, scale=scale, window_size=seen, **more)
    return out[None]


def efficient_takes(value: torch.Tensor) -> bool:
    """Whether torch's memory-efficient kernel computes this type."""
    return value.dtype in (torch.float32, torch.bfloat16, torch.float16)


def efficient_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """As :func:`varlen_kernel`, by torch's memory-efficient kernel: for float32, which the varlen kernel does not take,
    and heads of any size. It is what nested tensors call, ``sdpa_nested_preprocessing`` in torch's sources."""
    group, size = query.shape[1] // key.shape[1], value.shape[-1]
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    # Rows of whole 16 bytes: zeros at their end change neither products nor the kept part of the result.
    q, k, v = (F.pad(x.transpose(1, 2).to(value.dtype), (0, -x.shape[-1] % 8)) for x in (query, key, value))
    found = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, *bounds, 0.0, CAUSAL_FROM_THE_END, q.requires_grad or k.requires_grad or v.requires_grad,
        scale=scale, window_size=window,
    )  # fmt: skip
    return found[0][..., :size]
