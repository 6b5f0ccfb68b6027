"""Forward passes that continue sequences from their keys and values: many at once, or one by one where need be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel

from asyncrlhf.learner.attention import IMPLEMENTATION, PackedLayout, packed_attention
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


class Passes:
    """Passes over the new tokens of sequences whose earlier keys and values are cached.

    ``packed``: all sequences in one pass without padding, by the model's own code around attention that reads the
    caches. That is for models that call transformers' attention interface and hand its keyword arguments on; outside of
    these passes they keep the attention that they have. Else one pass a sequence, in which attention is the model's own
    affair. Raises RefusedError for a model that cannot be called so.
    """

    def __init__(self, model: PreTrainedModel, packed: bool = True) -> None:
        self.model = model
        self.packed = packed
        self._base: Any = model.base_model
        known = signature(self._base.forward).parameters
        self._takes_positions = "position_ids" in known
        takes_more = any(p.kind is Parameter.VAR_KEYWORD for p in known.values())
        if packed and not (model._supports_attention_backend and self._takes_positions and takes_more):
            raise RefusedError("does not use transformers' attention interface")
        if not packed and not {"past_key_values", "use_cache"} <= set(known):
            raise RefusedError("takes no keys and values of earlier tokens")
        AttentionInterface.register(IMPLEMENTATION, packed_attention)

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

    @torch.inference_mode()
    def extend(self, sequences: Sequence[tuple[DynamicCache, IntArray]]) -> list[torch.Tensor]:
        """The hidden states [n, H] of each sequence's new tokens [n], whose keys and values its cache takes up.

        The states are views: keep copies of parts of them. After an error, such as torch.OutOfMemoryError, the caches
        hold nothing that can be used.
        """
        return self._together(sequences) if self.packed else [self._alone(cache, ids) for cache, ids in sequences]

    def _together(self, sequences: Sequence[tuple[DynamicCache, IntArray]]) -> list[torch.Tensor]:
        caches, tokens = zip(*sequences, strict=True)
        lengths = [len(ids) for ids in tokens]
        pasts = [int(cache.get_seq_length()) for cache in caches]
        places = [np.arange(past, past + n) for past, n in zip(pasts, lengths, strict=True)]
        ids, positions = self._row(np.concatenate(tokens)), self._row(np.concatenate(places))
        seen = [self._seen(past, n) for past, n in zip(pasts, lengths, strict=True)]
        layout = _CachedLayout(len(lengths), max(lengths), positions, lengths=lengths, caches=caches, seen=seen)
        config: Any = self._base.config.get_text_config()
        own, config._attn_implementation_internal = config._attn_implementation_internal, IMPLEMENTATION
        try:
            output = self._base(input_ids=ids, position_ids=positions, packed_layout=layout, use_cache=False)
        finally:
            config._attn_implementation_internal = own
        return list(output.last_hidden_state[0].split(lengths))

    def _alone(self, cache: DynamicCache, ids: IntArray) -> torch.Tensor:
        past = int(cache.get_seq_length())
        options = {"position_ids": self._row(np.arange(past, past + len(ids)))} if self._takes_positions else {}
        output = self._base(input_ids=self._row(ids), past_key_values=cache, use_cache=True, **options)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _seen(self, past: int, n: int) -> torch.Tensor | None:
        """Which of past + n tokens each of the last n may see: [n, past + n]; None where plain causality says it."""
        return torch.ones((n, past + n), dtype=torch.bool, device=self.model.device).tril(past) if past else None

    def _row(self, ids: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64))[None].to(self.model.device)


@dataclass(frozen=True, kw_only=True)
class _CachedLayout(PackedLayout):
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
