"""One call of a model over packed inputs: all sequences together, or one after the other by its own forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from asyncrlhf.learner.attention.attention import IMPLEMENTATION, PackedLayout
from asyncrlhf.models.plain_pass import own_pass, takes
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.learner.model.inputs import PackedInputs


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """torch's autocast; without a ``dtype`` a context without effect."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def is_packed(model: Any) -> bool:
    """Whether ``model``, or its trunk, has packed attention: all sequences pass together."""
    return bool(model.config.get_text_config()._attn_implementation == IMPLEMENTATION)


def trunk_of(model: transformers.PreTrainedModel) -> Any:
    """The part of ``model`` below the output layer."""
    below: Any = model.base_model
    if below is not model:
        return below
    # Some classes name their trunk otherwise than their base_model_prefix says, and are then their own base model.
    return next((part for part in model.children() if isinstance(part, transformers.PreTrainedModel)), model)


def name_of_trunk(model: transformers.PreTrainedModel) -> str:
    """Its name within ``model``."""
    trunk = trunk_of(model)
    return next(name for name, module in model.named_modules() if module is trunk)


def last_hidden(trunk: Any, inputs: PackedInputs) -> torch.Tensor:
    """The last hidden states [K, hidden] of ``inputs``."""
    if is_packed(trunk):
        return _together(trunk, inputs).last_hidden_state[0]
    parts = [own_pass(trunk, text[None]).last_hidden_state[0, -own:] for text, own in _texts(inputs)]
    return torch.cat(parts)


def predicting_logits(model: Any, inputs: PackedInputs) -> torch.Tensor:
    """The logits [M, V] that predict the M targets, by the model's own forward, which may scale or cap them."""
    if is_packed(model):
        keeps = takes(model, "logits_to_keep")
        logits = _together(model, inputs, **({"logits_to_keep": inputs.rows} if keeps else {})).logits[0]
        return logits if keeps else logits.index_select(0, inputs.rows)
    parts = [own_pass(model, text[None], last=own).logits[0, -own:] for text, own in _texts(inputs)]
    return torch.cat(parts).index_select(0, inputs.rows)


def silence_dropout(model: nn.Module) -> None:
    """Switch all dropout off, in place: a policy gradient needs the log-probs of the policy that is published.

    Whatever a module computes only in training is off. Layers that gradient checkpointing repeats must count as
    training (:func:`checkpoint_layers`), so their own probabilities are zero as well.
    """
    model.train(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def decoder_layers(model: transformers.PreTrainedModel) -> list[nn.Module]:
    """The layers of ``model``, by transformers' names for them; empty where it has none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_layers(model: transformers.PreTrainedModel, but: Sequence[nn.Module] = ()) -> None:
    """Let ``model`` compute its layers again in the backward pass, with dropout still off; not those of ``but``."""
    model.gradient_checkpointing_enable()
    for layer in but:
        vars(layer)["gradient_checkpointing"] = False
    for module in model.modules():
        # transformers repeats a layer only in training; its parts stay in evaluation.
        module.training = bool(getattr(module, "gradient_checkpointing", False))


# The compiler's limits on what it computes again, all of them on work without matrix products.
CHEAP_TO_REPEAT = (
    "ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains", "ban_recompute_materialized_backward",
)  # fmt: skip


def compile_layers(model: transformers.PreTrainedModel) -> None:
    """Compile each decoder layer of ``model`` in place, all of them as one graph for any number of tokens.

    From then on the compiler of this process saves for backward passes only what costs a matrix product or an attention
    to compute again: norms and gated activations, a third of a layer's bytes, are fused into the kernels that use them.
    """
    layers = decoder_layers(model)
    check(
        layers,
        f"learner.compile=true: transformers does not say which modules of a {type(model).__name__} are its layers; "
        "allowed: compile=false.",
    )
    import torch._functorch.config as partitioner  # with the compiler, a second of each process

    for limit in CHEAP_TO_REPEAT:
        setattr(partitioner, limit, False)
    for layer in layers:
        layer.compile(dynamic=True)


def _together(model: Any, inputs: PackedInputs, **more: Any) -> Any:
    places, layout = inputs.layout.position_ids, inputs.layout
    return model(input_ids=inputs.token_ids, position_ids=places, packed_layout=layout, use_cache=False, **more)


def _texts(inputs: PackedInputs) -> Iterator[tuple[torch.Tensor, int]]:
    """The tokens of each sequence, a prompt that is packed with another one included, and how many are its own."""
    layout, ids = inputs.layout, inputs.token_ids[0]
    assert isinstance(layout, PackedLayout), "sequences one by one need whole sequences on each rank"
    for first, own, prompt, shared in layout.spans.tolist():
        if own:
            yield torch.cat((ids[prompt : prompt + shared], ids[first : first + own])), own
