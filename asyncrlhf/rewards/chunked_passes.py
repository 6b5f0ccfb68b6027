"""Forward passes that continue sequences from their keys and values: many at once, or one by one where need be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrlhf.rewards.model import head_of, is_causal
from asyncrlhf.types import IntArray

ATTENTION_NAME = "asyncrlhf_chunks"
CAPACITY_MULTIPLE = 64  # tokens: a cache grows in these steps
# Rotary embeddings that turn earlier tokens otherwise once the sequence is longer: what is cached would be wrong then.
MOVING_ROPE = ("dynamic", "longrope")


class ChunkingRefusedError(Exception):
    """Why a model's passes cannot be continued, as the end of a sentence; its rollouts are read at their end."""


@dataclass(frozen=True)
class Extension:
    """Tokens [n] that follow those in ``cache``, which takes up their keys and values; None begins, keeping nothing."""

    cache: Any
    token_ids: IntArray


class Passes(Protocol):
    def begin(self) -> Any:
        """An empty cache."""
        ...

    def extend(self, extensions: Sequence[Extension]) -> list[torch.Tensor]:
        """The hidden states [n, H] of the tokens of each; views, of which copies must be made to keep a part. After an
        error, such as torch.OutOfMemoryError, the caches are worth nothing."""
        ...

    def fork(self, cache: Any, length: int) -> Any:
        """A cache of its own with the first ``length`` tokens of another."""
        ...


# Of texts [n] and the hidden states [n, H] that passes in pieces gave of each: what the model makes of the texts as a
# whole, and the same numbers made of the hidden states.
Compare = Callable[[Sequence[IntArray], Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


def static_refusal(model: PreTrainedModel) -> str | None:
    """What a reward model's config alone says against chunks, as the end of a sentence; its weights may be missing."""
    return past_refusal(model.config) if is_causal(model) else "is no causal model with a linear head"


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


def build_passes(model: PreTrainedModel) -> Passes:
    """The fastest way that is right for a reward model; raises ChunkingRefusedError when there is none."""
    refusal = static_refusal(model)
    if refusal is not None:
        raise ChunkingRefusedError(refusal)
    return first_right(model, (PackedPasses, SinglePasses), partial(_last_scores, model))


def first_right(
    model: PreTrainedModel, kinds: Sequence[Callable[[PreTrainedModel], Passes]], compare: Compare
) -> Passes:
    """The first of ``kinds`` that is right for ``model``; raises ChunkingRefusedError when none is.

    Right is what was tried: of a few tokens in pieces the model must make what it makes of them as a whole.
    """
    refusal = ""
    for kind in kinds:
        try:
            passes = kind(model)
            _try_out(passes, model, compare)
        except ChunkingRefusedError as error:
            refusal = str(error)
            continue
        return passes
    raise ChunkingRefusedError(refusal)


@torch.inference_mode()
def _try_out(passes: Passes, model: PreTrainedModel, compare: Compare) -> None:
    base: Any = model.base_model
    vocabulary = int(base.get_input_embeddings().num_embeddings)
    texts = [np.arange(n) * 7 % vocabulary for n in (7, 5)]
    caches = [passes.begin() for _ in texts]
    pieces = [
        passes.extend([Extension(c, ids[start:stop]) for c, ids in zip(caches, texts, strict=True)])
        for start, stop in ((0, 2), (2, 3), (3, None))
    ]
    if [cache.length for cache in caches] != [len(ids) for ids in texts]:
        raise ChunkingRefusedError("keeps no keys and values")
    one, other = compare(texts, [torch.cat(states) for states in zip(*pieces, strict=True)])
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    # Written so that a result that is no number is refused too.
    if not bool(((one - other).abs() <= tolerance * one.abs().clamp(min=1.0)).all()):
        raise ChunkingRefusedError("reads a text in pieces otherwise than as a whole")


def _last_scores(
    model: PreTrainedModel, texts: Sequence[IntArray], hidden: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    base: Any = model.base_model
    head = head_of(model)
    whole = [base(input_ids=_row(ids, model), use_cache=False).last_hidden_state[0, -1] for ids in texts]
    return head(torch.stack(whole)).float(), head(torch.stack([states[-1] for states in hidden])).float()


def _row(ids: IntArray, model: PreTrainedModel) -> torch.Tensor:
    return torch.from_numpy(np.asarray(ids, np.int64))[None].to(model.device)


class PackedCache:
    """Keys and values [2, Hkv, capacity, D] of one sequence for each layer; the first write tells the shape.

    They are held as attention reads them: in autocast's type where it is on, whatever the projections gave.
    """

    def __init__(self) -> None:
        self.length = 0
        self.layers: dict[int, torch.Tensor] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put [Hkv, n, D] behind what is held; returns keys and values [Hkv, length + n, D] of the whole sequence."""
        stop = self.length + key.shape[1]
        held = self.layers.get(layer)
        kind = key.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else key.dtype
        if held is None or held.shape[2] < stop:
            capacity = -(-stop // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
            grown = key.new_empty((2, key.shape[0], capacity, key.shape[2]), dtype=dtype)
            if held is not None:
                grown[:, :, : self.length] = held[:, :, : self.length]
            held = self.layers[layer] = grown
        held[0, :, self.length : stop] = key
        held[1, :, self.length : stop] = value
        return held[0, :, :stop], held[1, :, :stop]


@dataclass(frozen=True)
class _Span:
    """Where one sequence's new tokens lie among the packed ones, and which of the sequence's tokens each may see."""

    start: int
    stop: int
    cache: PackedCache | None
    mask: torch.Tensor | None  # [n, past + n]; None where causality from the first token on says it


class PackedPasses:
    """All sequences in one pass over their new tokens [T], packed without padding: the model's own code, our attention.

    For models that call transformers' attention interface and hand its keyword arguments on.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        known = signature(base.forward).parameters
        takes_more = any(p.kind is Parameter.VAR_KEYWORD for p in known.values())
        if not model._supports_attention_backend or "position_ids" not in known or not takes_more:
            raise ChunkingRefusedError("does not use transformers' attention interface")
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
        self._base = base
        self._model = model
        found = {id(m.config): m.config for m in base.modules() if hasattr(m, "config")}
        self._configs: list[Any] = [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]

    def begin(self) -> PackedCache:
        return PackedCache()

    @torch.inference_mode()
    def extend(self, extensions: Sequence[Extension]) -> list[torch.Tensor]:
        spans: list[_Span] = []
        positions: list[IntArray] = []
        start = 0
        for extension in extensions:
            n, past = len(extension.token_ids), extension.cache.length if extension.cache is not None else 0
            spans.append(_Span(start, start + n, extension.cache, self._mask(past, n)))
            positions.append(np.arange(past, past + n))
            start += n
        with self._own_attention():
            output = self._base(
                input_ids=_row(np.concatenate([e.token_ids for e in extensions]), self._model),
                position_ids=_row(np.concatenate(positions), self._model),
                use_cache=False,
                chunk_spans=spans,
            )
        for span in spans:
            if span.cache is not None:
                span.cache.length += span.stop - span.start
        return [output.last_hidden_state[0, span.start : span.stop] for span in spans]

    def _mask(self, past: int, n: int) -> torch.Tensor | None:
        if past == 0:
            return None
        return torch.ones((n, past + n), dtype=torch.bool, device=self._model.device).tril(past)

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """For one pass: whole batches (:func:`~asyncrlhf.rewards.model.score_batch`) go through the model's own."""
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = ATTENTION_NAME
        try:
            yield
        finally:
            for config, own in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = own

    @torch.inference_mode()
    def fork(self, cache: PackedCache, length: int) -> PackedCache:
        made = PackedCache()
        for layer, held in cache.layers.items():
            made.write(layer, held[0, :, :length], held[1, :, :length])
        made.length = length
        return made


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    chunk_spans: Sequence[_Span] | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    layer: int | None = getattr(module, "layer_idx", None)
    if chunk_spans is None or layer is None or any(x is not None for x in (softcap, s_aux, position_bias)):
        raise ChunkingRefusedError("has an attention of its own kind")
    heads, tokens, dim = query.shape[1:]
    kv_heads = key.shape[1]
    # The heads of a group stand behind one key head: grouped attention without copies of the keys.
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, dim)
    parts = []
    for span in chunk_spans:
        k, v = key[0, :, span.start : span.stop], value[0, :, span.start : span.stop]
        if span.cache is not None:
            k, v = span.cache.write(layer, k, v)
        shape = (-1, heads // kv_heads, -1, -1)
        out = F.scaled_dot_product_attention(
            grouped[:, :, span.start : span.stop],
            k[:, None].expand(shape),
            v[:, None].expand(shape),
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=scaling,
        )
        parts.append(out.flatten(0, 1).transpose(0, 1))
    return torch.cat(parts)[None], None


class SinglePasses:
    """One pass a sequence, over transformers' own cache: for models whose attention is their own affair."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: Any = model.base_model
        self._model = model
        known = signature(self._base.forward).parameters
        if not {"past_key_values", "use_cache"} <= set(known):
            raise ChunkingRefusedError("takes no keys and values of earlier tokens")
        self._takes_positions = "position_ids" in known
        if not all(type(layer) is DynamicLayer for layer in self.begin().states.layers):
            raise ChunkingRefusedError("keeps another state than the keys and values of all tokens")

    def begin(self) -> _SingleCache:
        return _SingleCache(DynamicCache(config=self._model.config))

    @torch.inference_mode()
    def extend(self, extensions: Sequence[Extension]) -> list[torch.Tensor]:
        return [self._extend(extension) for extension in extensions]

    def _extend(self, extension: Extension) -> torch.Tensor:
        n = len(extension.token_ids)
        options: dict[str, Any] = {}
        past = 0
        if extension.cache is not None:
            past = extension.cache.length
            options["past_key_values"] = extension.cache.states
        if self._takes_positions:
            options["position_ids"] = _row(np.arange(past, past + n), self._model)
        ids = _row(extension.token_ids, self._model)
        output = self._base(input_ids=ids, use_cache=extension.cache is not None, **options)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def fork(self, cache: _SingleCache, length: int) -> _SingleCache:
        made = DynamicCache(config=self._model.config)
        for index, layer in enumerate(cache.states.layers):
            assert layer.keys is not None and layer.values is not None
            made.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
        return _SingleCache(made)


@dataclass(frozen=True)
class _SingleCache:
    states: DynamicCache

    @property
    def length(self) -> int:
        return int(self.states.get_seq_length())
