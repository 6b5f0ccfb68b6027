"""A model's own pass over one text with transformers' plainest attention, which every faster pass must equal."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import longest_span
from asyncrlhf.models.vocabulary import sampled_ids
from asyncrlhf.types import IntArray

# What a model's own code raises if it is called in a way that it does not know.
MISCALLED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
# Parameters times tokens of one pass that every process can afford at its start: 135M parameters and 37 tokens.
AFFORDABLE = 5e9


def rounding(dtype: torch.dtype) -> float:
    """The :func:`difference` of log-probs, in nats, that two right passes in ``dtype`` may have. Models in float64
    compute norms and rotations in float32; in half precision unlikely tokens' log-probs are as coarse as their logits.
    """
    return {torch.float64: 1e-4, torch.float32: 1e-3}.get(dtype, 0.1)


def difference(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest |difference| of two tensors of one shape; in half precision, ``dtype``, the mean one."""
    apart = (ours.double() - theirs.double()).abs()
    return float(apart.mean() if dtype.itemsize < 4 else apart.max())


def probe_texts(model: transformers.PreTrainedModel, seed: int = 0) -> list[IntArray]:
    """Three random texts that show how a model treats neighbours, from the shortest on; the longest one exceeds every
    window if a pass over it is affordable."""
    longest = longest_span(model.config) + 5
    context = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if longest > context or longest * parameters > AFFORDABLE:
        longest = 0
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    rows = [int(embedding.num_embeddings), *([] if head is None else [int(head.weight.shape[0])])]
    most = min(sampled_ids(model) or rows[0], *rows)
    draws = np.random.default_rng(seed)
    # Not the first ids: some families give positions no meaning where a padding token stands.
    return [draws.integers(min(4, most - 1), most, n, dtype=np.int64) for n in (5, 9, max(longest, 12))]


@torch.no_grad()
def plain_logits(
    model: transformers.PreTrainedModel, texts: Sequence[IntArray], causal: bool = True
) -> list[torch.Tensor]:
    """[L, V] float64 of each text [L] alone: eager attention, no cache, no dropout.

    Raises ConfigError if the model's own code fails, or, with ``causal``, if a token's logits depend on later tokens.
    """
    found = []
    with plain_attention(model):
        for text in texts:
            ids = torch.from_numpy(text).to(model.device)
            try:
                whole, *parts = (own_pass(model, x[None]).logits[0] for x in ((ids, ids[:-1]) if causal else (ids,)))
            except MISCALLED as error:
                raise ConfigError(
                    f"model.path: transformers' own forward pass of {type(model).__name__} fails on a plain text: "
                    f"{first_line(error)}."
                ) from error
            if not torch.isfinite(whole).all():
                raise ConfigError(f"model.path: {type(model).__name__} gives logits that are not finite.")
            found.append(whole.double())
            peeked = max(
                (difference(whole[:-1].log_softmax(-1), p.log_softmax(-1), model.dtype) for p in parts), default=0
            )
            if peeked > rounding(model.dtype) / 10:
                raise ConfigError(
                    f"model.path: {type(model).__name__} does not generate text from left to right: its log-probs "
                    f"change by {peeked:.1g} with a later token; allowed: a causal language model."
                )
    return found


def own_pass(model: Any, ids: torch.Tensor, *, last: int = 0, use_cache: bool = False, **given: Any) -> Any:
    """The output of ``model``, or of its trunk, for tokens [n, l] without padding by its own forward pass. ``last``:
    only the logits of so many tokens at the end are needed; others may be there."""
    known = inspect.signature(model.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()) or "use_cache" in known:
        given["use_cache"] = use_cache
    if last and "logits_to_keep" in known:
        given["logits_to_keep"] = last
    return model(input_ids=ids, **given)


def takes(model: Any, name: str) -> bool:
    """Whether the forward pass of ``model`` has an argument ``name``."""
    return name in inspect.signature(model.forward).parameters


@contextmanager
def plain_attention(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Within this context ``model`` computes attention by transformers' eager code, and is in evaluation."""
    own, training = model.config._attn_implementation, model.training
    set_attention(model, "eager")
    model.train(False)
    try:
        yield
    finally:
        set_attention(model, own)
        model.train(training)


def set_attention(model: transformers.PreTrainedModel, name: str) -> None:
    """Models with attention code of their own keep it."""
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
