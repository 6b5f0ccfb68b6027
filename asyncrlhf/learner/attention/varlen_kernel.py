"""Torch's varlen kernel for GPUs, as far as the installed version of torch has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


def varlen_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's varlen kernel computes heads of this type and size (``mha_varlen_fwd`` in its flash_api.cpp)."""
    size, half = query.shape[-1], value.dtype in (torch.bfloat16, torch.float16)
    fits = half and size % 8 == 0 and size <= 256 and size == value.shape[-1]
    return fits and varlen_arguments() >= {"scale", "window_size"}


def varlen_arguments() -> frozenset[str]:
    """What this version of torch's ``varlen_attn`` takes; nothing where torch has none."""
    try:
        from torch.nn.attention import varlen
    except ImportError:  # before 2.10
        return frozenset()
    return _arguments(varlen.varlen_attn)


@lru_cache(maxsize=8)
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def grouped_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(key, value, further arguments) for ``varlen_attn`` [T, heads, D]: before torch 2.13 it does not take fewer heads
    of keys than of queries, which are therefore repeated."""
    group = query.shape[1] // key.shape[1]
    if "enable_gqa" in varlen_arguments():
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
    """As ``varlen.flash_calls``, by ``torch.nn.attention.varlen`` on a GPU in half precision.

    key and value hold every sequence's keys, copies of shared prompts included; ``bounds`` are cumulative counts of
    queries and of keys [N+1] int32 and the maximum of each. The last query of a sequence sees its last key.
    """
    from torch.nn.attention import varlen

    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    seen = (-1, 0) if window is None else (window - 1, 0)
    k, v, more = grouped_heads(q, k, v)
    out: Any = varlen.varlen_attn(q, k, v, *bounds, scale=scale, window_size=seen, **more)
    return out[None]
