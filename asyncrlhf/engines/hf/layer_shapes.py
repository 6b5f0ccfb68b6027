"""Finds what the attention of each layer of a model keeps of a token, and for how long: by one first pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import context_of

PROBE_NAME = "asyncrlhf_slots_probe"
_NEITHER = -1  # stands for a window in the mask of a layer that sees neither all earlier tokens nor the last few


@dataclass(frozen=True)
class LayerShape:
    """The keys and values of one attention layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # the last tokens that a query sees, itself included; None: all


def find_layers(model: transformers.PreTrainedModel) -> dict[int, LayerShape]:
    """The shape of each layer of ``model``, by layer index, from two tokens that pass through it.

    The windows are those of the masks that transformers makes for the model's own attention, since not every family
    tells its attention function the window. Raises ConfigError for a model whose attention cannot be replaced by a
    function of queries, keys and values over a cache with one row per sequence.
    """
    if not model._supports_attention_backend:
        raise refusal(model, "it does not use transformers' attention interface")
    if model._is_stateful:
        raise refusal(model, "it has layers that keep a state in place of keys and values")
    transformers.AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _probe_mask)
    found: dict[int, LayerShape] = {}
    before = model.config._attn_implementation
    model.set_attn_implementation(PROBE_NAME)
    two = torch.arange(2, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros_like(two), position_ids=two, use_cache=False, slots_probe=found)
    except _UnknownAttention as error:
        raise refusal(model, str(error)) from error
    finally:
        model.set_attn_implementation(before)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(found))
    if not found or sorted(found) != list(range(layers)):
        raise refusal(model, f"{len(found)} of its {layers} layers use transformers' attention interface")
    return found


def refusal(model: transformers.PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(f"generator.engine=hf cannot give {type(model).__name__} a cache with a row per slot: {reason}.")


class _UnknownAttention(Exception):
    """A layer's attention is another function than that of :mod:`asyncrlhf.engines.hf.slot_attention`."""


def _probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    slots_probe: dict[int, LayerShape] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: notes the layer's shape in ``slots_probe``."""
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if slots_probe is None:
        raise _UnknownAttention(f"{name} does not get the keyword arguments of the forward call")
    if layer is None:
        raise _UnknownAttention(f"{name} has no layer index")
    if layer in slots_probe:
        raise _UnknownAttention(f"layer {layer} attends more than once")
    if position_bias is not None:
        raise _UnknownAttention(f"{name} has a position bias")
    window = sliding_window
    if attention_mask is not None:
        if attention_mask.dtype != torch.int64:
            raise _UnknownAttention(f"{name} has a mask of its own")
        window = int(attention_mask.flatten()[0])
        if window == _NEITHER:
            raise _UnknownAttention(f"{name} sees neither all earlier tokens nor the last few")
    slots_probe[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window or None)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    config: Any,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor:
    """transformers' mask interface: a mask whose every entry is the window, so that a part of it still says so; 0 if
    there is none."""
    # transformers asks for vmap where a family combines the mask with a function of its own.
    window = _NEITHER if use_vmap else _window(mask_function, max(context_of(config), 2), device)
    return torch.full((batch_size, 1, q_length, kv_length), window, device=device)


def _window(mask_function: Callable[..., torch.Tensor], context: int, device: torch.device | str) -> int:
    keys, zero = torch.arange(context, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    counts = []
    for query in (context - 1, context - 2):
        try:
            sees = mask_function(zero, zero, zero + query, keys).expand(context)
        except IndexError:  # it looks up something of each token of this pass
            return _NEITHER
        counts.append(int(sees.sum()))
        if not torch.equal(sees, (keys <= query) & (keys > query - counts[-1])):
            return _NEITHER
    if counts == [context, context - 1]:
        return 0
    return counts[0] if counts[0] == counts[1] else _NEITHER
