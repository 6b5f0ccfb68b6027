"""Attention over packed sequences: every op of the model runs on [1, T] without padding.

The function is registered with transformers under ``IMPLEMENTATION``; a model switched to it by
``use_packed_attention`` must be called with ``packed_layout=PackedLayout(...)`` and position ids that restart at every
sequence. transformers builds no mask for names that it does not know, so causality and the borders between sequences
come from the layout alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed.tensor import DTensor

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.attention.tiles import Scoring, tiled_attention
from asyncrlhf.learner.attention.varlen import (
    efficient_kernel,
    efficient_takes,
    flash_calls,
    masked_calls,
    varlen_kernel,
    varlen_takes,
)
from asyncrlhf.models.copies import to_device
from asyncrlhf.types import IntArray

IMPLEMENTATION = "asyncrlhf_packed"
OPTIONS = ("sliding_window", "softcap", "s_aux")  # transformers' names of what Scoring has beside the scale
# Arguments that do not change what a causal layer computes from query, key and value.
WITHOUT_EFFECT = frozenset(("dropout", "position_ids", "use_cache", "cache_position", "return_dict", "logits_to_keep"))
MORE_RESULTS = "output_"  # how the names of those begin that ask for more results


@dataclass(frozen=True)
class Layout(ABC):
    """Which packed tokens form a sequence, and how they attend to each other."""

    position_ids: torch.Tensor  # [1, T]
    # [T, E] the experts of each token, see ``models/routes.py``; None: the model chooses
    routes: torch.Tensor | None = field(default=None, kw_only=True)

    @abstractmethod
    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """``query`` [1, heads, T, D], ``key`` and ``value`` [1, kv_heads, T, D] -> [1, T, heads, D]."""


@dataclass(frozen=True)
class PackedLayout(Layout):
    """The position of each of N sequences among T packed tokens; siblings may share their prompt's tokens.

    A shared prompt is packed once, with the first sequence that has it; all of them use its keys and values, whose
    gradients are summed.
    """

    spans: torch.Tensor  # [N, 4] int64 in host memory, see ``varlen.plan_calls``
    # [N+1] int32, cumulative: each sequence's own tokens, and all of its tokens
    bounds: tuple[torch.Tensor, torch.Tensor]
    most: tuple[int, int]  # the most of each
    key_rows: torch.Tensor | None = None  # [K] the packed token of each key, where prompts are shared

    @classmethod
    def build(
        cls,
        lengths: IntArray,
        prompts: IntArray,
        owners: IntArray,
        device: torch.device | str = "cpu",
        routes: torch.Tensor | None = None,
    ) -> PackedLayout:
        """The layout of sequences of ``lengths`` [N] tokens, each at least 1.

        The first ``prompts`` [N] tokens of sequence i are those of sequence ``owners[i]``, which may be i itself.
        """
        elsewhere = np.where(owners == np.arange(len(lengths)), 0, prompts)  # tokens that are packed with another one
        own = lengths - elsewhere
        starts = np.cumsum(own) - own
        spans = np.stack([starts, own, np.where(elsewhere > 0, starts[owners], 0), elsewhere], axis=1)
        positions = np.arange(own.sum()) - np.repeat(starts - elsewhere, own)
        key_rows = None
        if elsewhere.any():
            places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            first, _, prompt, shared = np.repeat(spans, lengths, axis=0).T
            rows = np.where(places < shared, prompt + places, first + places - shared)
            key_rows = to_device(torch.from_numpy(rows), device)

        def bounds(counts: IntArray) -> torch.Tensor:
            return to_device(torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)), device)

        return cls(
            position_ids=to_device(torch.from_numpy(positions[None]), device),
            spans=torch.from_numpy(spans.astype(np.int64)),
            bounds=(bounds(own), bounds(lengths)),
            most=(int(own.max()), int(lengths.max())),
            key_rows=key_rows,
            routes=routes,
        )

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """By the kernel that fits the device, the dtype and the scoring."""
        scale, window = scoring.scale, scoring.window
        window = None if window is None or window >= self.most[1] else window
        if not scoring.is_plain:
            return tiled_attention(query, key, value, self.spans, scoring._replace(window=window))
        if query.device.type == "cpu" and window is None and query.shape[-1] == value.shape[-1]:
            return flash_calls(query, key, value, self.spans, scale)
        if self.key_rows is not None:
            key, value = key.index_select(2, self.key_rows), value.index_select(2, self.key_rows)
        bounds = (*self.bounds, *self.most)
        if query.is_cuda and varlen_takes(query, value):
            return varlen_kernel(query, key, value, bounds, scale, window)
        if query.is_cuda and efficient_takes(value):
            return efficient_kernel(query, key, value, bounds, scale, window)
        own, shared = self.spans[:, 1], self.spans[:, 3]
        return masked_calls(query, key, value, (own.tolist(), (own + shared).tolist()), scale, window)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_layout: Layout | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence.

    ``query`` [1, heads, T, D], ``key`` and ``value`` [1, kv_heads, T, D]; returns ([1, T, heads, D], None). ``given``
    may hold ``OPTIONS``, the last three fields of :class:`Scoring`. Dropout is ignored: a policy gradient needs the
    log-probs of the policy that is published.

    Raises ConfigError for a model that asks for anything else: its log-probs would differ from transformers' own.
    """
    if packed_layout is None:
        raise ConfigError(
            f"model.path: the attention layers of the model ({type(module).__name__}) do not get the keyword arguments "
            "of its forward, so it cannot be trained packed; allowed: families that pass them on."
        )
    unknown = _unknown(module, given | {"attention_mask": attention_mask})
    if unknown:
        raise ConfigError(
            f"model.path: {type(module).__name__} passes {', '.join(unknown)} to its attention, which packed attention "
            f"cannot compute; allowed: causal attention with or without {', '.join(OPTIONS)}."
        )
    window, softcap, sinks = (given.get(name) for name in OPTIONS)
    if isinstance(sinks, DTensor):  # dealt out over the ranks like the heads
        sinks = sinks.to_local()
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ConfigError(
            f"model.path: {type(module).__name__} has {query.shape[1]} attention heads and attention sinks of shape "
            f"{tuple(sinks.shape)} on this rank; allowed: one sink for each head."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_layout.attend(module, query, key, value, Scoring(scale, window, softcap, sinks)), None


def _unknown(module: torch.nn.Module, given: dict[str, Any]) -> list[str]:
    """The arguments, as a sentence names them, that ask for something else than the attention of a decoder."""
    causal = given.pop("is_causal", None)
    if causal is None:  # what a call asks for counts more than what the layer is
        causal = getattr(module, "is_causal", True)
    names = [name for name, value in given.items() if value is not None and name not in (*OPTIONS, *WITHOUT_EFFECT)]
    return ([] if causal else ["is_causal=False"]) + sorted(n for n in names if not n.startswith(MORE_RESULTS))


def use_packed_attention(model: transformers.PreTrainedModel) -> None:
    """Switch ``model`` to packed attention in place; raises ConfigError when its family cannot."""
    transformers.AttentionInterface.register(IMPLEMENTATION, packed_attention)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model.path: {type(model).__name__} cannot be trained packed; "
            "allowed: decoder-only models that use transformers' attention interface (Llama, GPT-NeoX, Qwen, ...)."
        )
    model.set_attn_implementation(IMPLEMENTATION)
