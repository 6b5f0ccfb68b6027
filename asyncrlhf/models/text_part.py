"""The language model inside a multi-modal checkpoint: its family and settings, and which of the checkpoint's tensors
are its own.

Nothing here knows a family. A text model is accepted if its tensors are found by name and shape, and if a small random
one computes the same logits as the multi-modal model that it was taken from.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import accelerate
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrlhf.errors import ConfigError
from asyncrlhf.models.miniature import shrunk

# Families that are tried in place of a text model that transformers has no causal class for, nearest names first.
TRIED = 6
PROBE_TOKENS = 12
# float64: the two models differ by rounding, or by much more than this share of the largest logit.
TOLERANCE = 1e-9
# How transformers' own plain forward computes attention and experts.
_PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TextPart:
    """A multi-modal model and its language model, both on the device ``meta``."""

    whole: transformers.PreTrainedModel
    text: transformers.PreTrainedModel
    names: Mapping[str, str]  # of each tensor of the language model: its name in the multi-modal model

    @property
    def about(self) -> str:
        return f"{type(self.text).__name__} of {type(self.whole).__name__}"


def find_text_part(shape: transformers.PretrainedConfig, where: str) -> TextPart:
    """The language model of a multi-modal checkpoint with the config ``shape``.

    Raises ConfigError, which begins with ``where``, if it has none that generates text, or if no causal language model
    of transformers computes the same as it does without images.
    """
    own, kind = text_shape(shape), _whole_class(shape)
    if own is shape or own.is_encoder_decoder or kind is None:
        raise ConfigError(
            f"{where} has the model type {shape.model_type}, which does not generate text from text alone; allowed: a "
            "causal language model, or a multi-modal model with one."
        )
    begun = (
        f"{where}: the language model of the model type {shape.model_type} ({own.model_type}) cannot be trained alone"
    )
    try:
        whole = _build(kind, shape, torch.float32)
        for family in _families(own):
            text = _build(transformers.AutoModelForCausalLM, _settings(shape, own, family, whole), torch.float32)
            names = _names(whole, text)
            if names is not None and _computes_the_same(kind, shape, family):
                return TextPart(whole, text, names)
    # What transformers raises for a config that its own classes cannot build or run, or that the small model breaks.
    except (ImportError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"{begun}, as the two cannot be compared: {reason}.") from error
    raise ConfigError(
        f"{begun}: transformers has no causal language model that computes the same as it does for text without images."
    )


def text_shape(shape: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The part of ``shape`` with the settings of the language model; ``shape`` itself if it is not multi-modal."""
    own: transformers.PretrainedConfig = shape.get_text_config(decoder=True)
    return own


def _families(own: transformers.PretrainedConfig) -> Iterator[type[transformers.PretrainedConfig]]:
    """The config classes of the causal language models that may compute what ``own`` describes: its own class, or, if
    transformers has no causal model for that, those with the nearest names."""
    known = transformers.AutoModelForCausalLM._model_mapping
    if type(own) in known:
        yield type(own)
        return
    names = [name for name, kind in CONFIG_MAPPING._mapping.items() if name in known._model_mapping]
    plain = own.model_type.removesuffix("_text").replace("_vl", "")
    yield from (CONFIG_MAPPING[name] for name in difflib.get_close_matches(plain, names, TRIED, cutoff=0.5))


def _whole_class(shape: transformers.PretrainedConfig) -> Any:
    """The class of the whole model: the one that the checkpoint names, else transformers' for this type, or None."""
    named = getattr(transformers, next(iter(shape.architectures or []), ""), None)
    if named is not None and getattr(named, "config_class", None) is type(shape):
        return named
    return transformers.AutoModelForMultimodalLM._model_mapping.get(type(shape), None)


def _build(
    kind: Any, shape: transformers.PretrainedConfig, dtype: torch.dtype, computed_buffers: bool = False
) -> transformers.PreTrainedModel:
    """The model in ``eval()``, on ``meta``; with ``computed_buffers`` only its parameters are there."""
    make = getattr(kind, "from_config", None) or kind._from_config
    blank = accelerate.init_empty_weights(include_buffers=False) if computed_buffers else torch.device("meta")
    with blank, missing_towers_left_out():
        model: transformers.PreTrainedModel = make(copy.deepcopy(shape), dtype=dtype, **_PLAIN)
    model.tie_weights()
    return model.eval()


@contextmanager
def missing_towers_left_out() -> Iterator[None]:
    """A tower that needs a package which is not installed, such as timm, is an empty module: text does not reach it."""
    build = transformers.AutoModel.from_config

    def build_or_leave_out(*arguments: Any, **options: Any) -> nn.Module:
        try:
            tower: nn.Module = build(*arguments, **options)
        except ImportError:
            tower = nn.Module()
        return tower

    with mock.patch.object(transformers.AutoModel, "from_config", build_or_leave_out):
        yield


def _settings(
    shape: transformers.PretrainedConfig,
    own: transformers.PretrainedConfig,
    family: type[transformers.PretrainedConfig],
    whole: transformers.PreTrainedModel,
) -> transformers.PretrainedConfig:
    """The language model's config as one of ``family``; the whole model decides what only it does: whether the output
    layer is tied, and which tokens begin and end a text."""
    if family is type(own):
        made = copy.deepcopy(own)
    else:
        skipped = {"model_type", "architectures", "transformers_version"}
        kept = {k: getattr(own, k) for k in family().to_dict() if k not in skipped and hasattr(own, k)}
        # For text, positions with several dimensions are plain ones; engines would take them for another model's.
        kept["rope_parameters"] = {k: v for k, v in (own.rope_parameters or {}).items() if not k.startswith("mrope")}
        made = family(**copy.deepcopy(kept))
    head, words = whole.get_output_embeddings(), whole.get_input_embeddings()
    made.tie_word_embeddings = head is not None and head.weight is words.weight
    for name in _SPECIAL:
        if getattr(shape, name, None) is not None:
            setattr(made, name, getattr(shape, name))
    made.dtype = shape.dtype or own.dtype
    return made


def _names(whole: transformers.PreTrainedModel, text: transformers.PreTrainedModel) -> dict[str, str] | None:
    """The name in ``whole`` of each tensor of ``text``; None unless each is found exactly once.

    The layers are found as the one module whose tensors have the same names and shapes; the others, such as the
    output layer, by the ends of their names.
    """
    ours, theirs = ({n: t.shape for n, t in model.state_dict().items()} for model in (text, whole))
    trunk = next(name for name, child in text.named_children() if isinstance(child, transformers.PreTrainedModel))
    layers = _below(ours, trunk)
    places = [n for n, m in whole.named_modules() if isinstance(m, transformers.PreTrainedModel)]
    found = [place for place in places if _below(theirs, place) == layers]
    if len(found) != 1:
        return None
    names = {f"{trunk}.{name}": f"{found[0]}.{name}" for name in layers}
    for name in ours.keys() - names.keys():
        same = [n for n in theirs.keys() - names.values() if f".{n}".endswith(f".{name}") and theirs[n] == ours[name]]
        if len(same) != 1:
            return None
        names[name] = same[0]
    return names


def _below(tensors: Mapping[str, torch.Size], place: str) -> dict[str, torch.Size]:
    return {name.removeprefix(f"{place}."): size for name, size in tensors.items() if name.startswith(f"{place}.")}


def _computes_the_same(
    kind: Any, shape: transformers.PretrainedConfig, family: type[transformers.PretrainedConfig]
) -> bool:
    """Whether a small random language model of ``family`` computes the logits of the small multi-modal model that
    holds the same tensors, from text. The tensors of towers are zeros without memory: text does not reach them."""
    small = copy.deepcopy(shape)
    own = text_shape(small)
    vars(own).update(vars(shrunk(own)))
    whole = _build(kind, small, torch.float64, computed_buffers=True)
    settings = _settings(small, own, family, whole)
    draws = torch.Generator().manual_seed(0)
    text = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float64, **_PLAIN)
    names = _names(whole, text)
    if names is None:
        return False
    for tensor in text.state_dict().values():
        if tensor.is_floating_point():
            # Layers far from their start: no difference may hide behind zeros and small numbers.
            mean, deviation = (0.0, tensor.shape[-1] ** -0.5) if tensor.dim() > 1 else (0.5, 0.2)
            tensor.normal_(mean, deviation, generator=draws)
    ids = torch.randint(1, settings.vocab_size, (1, PROBE_TOKENS), generator=draws)
    state = {n: torch.zeros((), dtype=t.dtype).expand(t.shape) for n, t in whole.state_dict().items()}
    state |= {names[n]: t for n, t in text.state_dict().items()}
    whole.load_state_dict(state, assign=True)
    whole.tie_weights()
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).logits
        logits = text.eval()(input_ids=ids, use_cache=False).logits
    return bool((logits - expected).abs().max() <= TOLERANCE * expected.abs().max() and expected.std() > 0)
