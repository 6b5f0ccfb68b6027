"""Forward passes that continue sequences from their keys and values: many at once, or one by one where need be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel

from asyncrlhf.learner.attention import IMPLEMENTATION, SplitLayout, packed_attention
from asyncrlhf.types import IntArray

# Rotary embeddings that turn earlier tokens otherwise once the sequence is longer: what is cached would be wrong then.
MOVING_ROPE = ("dynamic", "longrope")


class RefusedError(Exception):
    """Why a model cannot continue sequences, as the end of a sentence; they are read at their end."""


def past_refusal(of_model: PretrainedConfig) -> str | None:
    """Why a later token may see another past than the keys and values that were cached, as the end of a sentence."""
    config: Any = of_model.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        return f"has layers of {', '.join(sorted(set(kinds) - {'full_attention'}))}"
    if kinds is None and getattr(config, "sliding_window", None):
        return "has a sliding window"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return f"has rotary embeddings of type {rope}, which change with the length" if rope in MOVING_ROPE else None


class Passes(ABC):
    """Passes over the new tokens of sequences whose earlier keys and values are cached."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises RefusedError for a model that is not called as these passes call it."""
        self.model = model
        self._base: Any = model.base_model
        self._parameters = signature(self._base.forward).parameters

    def begin(self) -> DynamicCache:
        """An empty cache."""
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def fork(self, cache: DynamicCache, length: int) -> DynamicCache:
        """A cache of its own with the first ``length`` tokens of another."""
        made = self.begin()
        for index, (keys, values, *_) in enumerate(cache):
            made.update(keys[:, :, :length], values[:, :, :length], index)  # which copies them
        return made

    @abstractmethod
    def extend(self, sequences: Sequence[tuple[DynamicCache, IntArray]]) -> list[torch.Tensor]:
        """The hidden states [n, H] of each sequence's new tokens [n], whose keys and values its cache takes up.

        The states are views: keep copies of parts of them. After an error, such as torch.OutOfMemoryError, the caches
        hold nothing that can be used.
        """

    def _row(self, ids: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64))[None].to(self.model.device)


class PackedPasses(Passes):
    """All sequences in one pass, packed without padding: the model's own code, around attention that reads the caches.

    For models that call transformers' attention interface and hand its keyword arguments on. Outside of these passes
    the model keeps the attention that it has.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        takes_more = any(p.kind is Parameter.VAR_KEYWORD for p in self._parameters.values())
        if not model._supports_attention_backend or "position_ids" not in self._parameters or not takes_more:
            raise RefusedError("does not use transformers' attention interface")
        AttentionInterface.register(IMPLEMENTATION, packed_attention)

    @torch.inference_mode()
    def extend(self, sequences: Sequence[tuple[DynamicCache, IntArray]]) -> list[torch.Tensor]:
        caches, tokens = zip(*sequences, strict=True)
        lengths = [len(ids) for ids in tokens]
        pasts = [int(cache.get_seq_length()) for cache in caches]
        positions = [np.arange(past, past + n) for past, n in zip(pasts, lengths, strict=True)]
        seen = [self._seen(past, n) for past, n in zip(pasts, lengths, strict=True)]
        row = self._row(np.concatenate(positions))
        layout = _CachedLayout(len(lengths), max(lengths), row, lengths=lengths, caches=caches, seen=seen)
        config: Any = self._base.config
        own, config._attn_implementation_internal = config._attn_implementation_internal, IMPLEMENTATION
        try:
            ids = self._row(np.concatenate(tokens))
            output = self._base(input_ids=ids, position_ids=row, packed_layout=layout, use_cache=False)
        finally:
            config._attn_implementation_internal = own
        return list(output.last_hidden_state[0].split(lengths))

    def _seen(self, past: int, n: int) -> torch.Tensor | None:
        """Which of past + n tokens each of the last n may see: [n, past + n]; None where plain causality says it."""
        return torch.ones((n, past + n), dtype=torch.bool, device=self.model.device).tril(past) if past else None


@dataclass(frozen=True, kw_only=True)
class _CachedLayout(SplitLayout):
    """Of new tokens whose sequences have their earlier keys and values in caches."""

    lengths: Sequence[int]  # new tokens of each sequence
    caches: Sequence[DynamicCache]
    seen: Sequence[torch.Tensor | None]

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
        device = key.device.type
        held = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else key.dtype
        parts = []
        pieces = (tensor.split(self.lengths, dim=2) for tensor in (query, key.to(held), value.to(held)))
        for cache, seen, q, new_keys, new_values in zip(self.caches, self.seen, *pieces, strict=True):
            keys, values = cache.update(new_keys, new_values, module.layer_idx)
            # The heads of a group stand behind one key head: grouped attention without copies of the keys.
            q = q[0].unflatten(0, (key.shape[1], -1))
            k, v = (tensor[0][:, None].expand(-1, q.shape[1], -1, -1) for tensor in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=options["scaling"])
            parts.append(out.flatten(0, 1).transpose(0, 1))
        return torch.cat(parts)[None], None


class SinglePasses(Passes):
    """One pass a sequence: for models whose attention is their own affair."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if not {"past_key_values", "use_cache"} <= set(self._parameters):
            raise RefusedError("takes no keys and values of earlier tokens")

    @torch.inference_mode()
    def extend(self, sequences: Sequence[tuple[DynamicCache, IntArray]]) -> list[torch.Tensor]:
        return [self._extend(cache, ids) for cache, ids in sequences]

    def _extend(self, cache: DynamicCache, ids: IntArray) -> torch.Tensor:
        past = int(cache.get_seq_length())
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if "position_ids" in self._parameters:
            options["position_ids"] = self._row(np.arange(past, past + len(ids)))
        hidden: torch.Tensor = self._base(input_ids=self._row(ids), **options).last_hidden_state[0]
        return hidden
