"""A tiny random model of the same family as any checkpoint, for comparisons before a run that need no weights."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from asyncrlhf.errors import ConfigError
from asyncrlhf.models.shrinking import FILLINGS, WINDOW, Shrinking

MOST_PARAMETERS = 2**22  # of one parameter
# What constructors of configs and models raise for sizes that do not fit each other.
MISFITS = (
    ValueError, TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, AssertionError, RuntimeError,
    NotImplementedError, ImportError, StrictDataclassError,
)  # fmt: skip
# Parameters that are no matrix of a linear layer: norms, time constants and decays keep their own start.
_OWN_START = re.compile(r"norm|A_log|dt_|(^|\.)D$|time_|slope|decay|recurrent_param|ln_")


def miniature_config(shape: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """A config of the same family with a few layers of each kind, small widths, windows and vocabulary.

    What makes a family different stays: kinds of layers, grouped heads, the ratio of head sizes, rotary types and
    scalings, soft caps, sinks, dropout probabilities and tied heads. A config with several parts gives that of its
    text part, where that has a causal language model. ``shape`` is not changed. Raises ConfigError if the family
    has no causal language model or refuses the small sizes.
    """
    return build_miniature(shape).config


def build_miniature(
    shape: transformers.PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> transformers.PreTrainedModel:
    """A model of :func:`miniature_config`'s sizes in ``eval()``, on the CPU, whose weights depend on ``seed`` only.

    They are large enough that every token of a text changes the logits after it. Torch's global random state stays as
    it is. Raises ConfigError for a family that cannot be built, or that does not map a text to finite logits.
    """
    text, create = _text_part(shape)
    failed: BaseException | None = None
    for fill in (False, True):  # fields without a value keep none, unless the family needs one
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return _built(_shrunk(text, fill), create, dtype)
        except MISFITS as error:
            failed = failed or error
    assert failed is not None
    raise _refusal(shape, failed) from failed


@dataclass(frozen=True)
class Family:
    """What a model's config says of it, as a key of what was found on a small model of the same family."""

    key: str
    config: transformers.PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Family:
        facts = model.config.to_dict() | {"_name_or_path": type(model).__name__}
        return cls(json.dumps(facts, sort_keys=True, default=str), model.config)

    def small(self) -> transformers.PreTrainedModel | None:
        """The small model, in float64; None if none can be built, as of a checkpoint's own code that no config
        describes."""
        try:
            return build_miniature(self.config, dtype=torch.float64)
        except ConfigError:
            return None


def _built(
    config: transformers.PretrainedConfig, create: Callable[..., Any], dtype: torch.dtype
) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        outline = create(config)
    largest = max(outline.parameters(), key=torch.Tensor.numel)
    if largest.numel() > MOST_PARAMETERS:
        raise ValueError(f"a parameter has the shape {list(largest.shape)}")
    model: transformers.PreTrainedModel = create(config, dtype=dtype).eval()
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products have no float64
    _enlarge(model)
    _spread(model)
    return model


def _text_part(
    shape: transformers.PretrainedConfig,
) -> tuple[transformers.PretrainedConfig, Callable[..., Any]]:
    """The config of the part that generates text, and what creates its model."""
    families = transformers.AutoModelForCausalLM._model_mapping
    text = shape.get_text_config(decoder=True)
    if type(text) is type(shape):  # the config of an encoder and a decoder, of which it is a part without a name
        text = shape
    for config in (text, shape):
        if type(config) in families:
            own: Any = families[type(config)]
            own = own[0] if isinstance(own, tuple) else own
            # A config with several parts may name the class of its text part.
            return (text if own.config_class is type(text) else config), own._from_config
    if getattr(shape, "auto_map", None):  # code of the checkpoint, which ran when the config was loaded
        return shape, lambda config, **more: transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=True, **more
        )
    raise ConfigError(
        f"model.path: the model type {shape.model_type} does not generate text; allowed: a causal language model."
    )


def _shrunk(shape: transformers.PretrainedConfig, fill: bool) -> transformers.PretrainedConfig:
    sizes = copy.deepcopy(shape.to_dict())
    if fill:
        sizes |= {name: value for name, value in FILLINGS.items() if name in sizes and sizes[name] is None}
    Shrinking(sizes).apply()
    for name in ("transformers_version", "quantization_config"):
        sizes.pop(name, None)
    _strip_parts(sizes)
    return type(shape)(**sizes)


def _strip_parts(sizes: dict[str, Any]) -> None:
    """Leave out what every config has from those inside another one, which may accept their own fields only."""
    for part in sizes.values():
        if isinstance(part, dict) and "model_type" in part:
            for name in ("_name_or_path", "output_attentions", "transformers_version"):
                part.pop(name, None)
            _strip_parts(part)


def _refusal(shape: transformers.PretrainedConfig, error: BaseException) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (" ".join(lines[:2]) if lines else type(error).__name__).rstrip(".")
    return ConfigError(f"model.path: no small model of the model type {shape.model_type} can be built: {reason}.")


@torch.no_grad()
def _spread(model: transformers.PreTrainedModel) -> None:
    """Scale the output layer so that logits vary by some units; runs the model once."""
    head = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(3, 3 + 2 * WINDOW, device=model.device)[None] % embeddings.num_embeddings
    spread = float(model(input_ids=ids, use_cache=False).logits.float().std())
    if not math.isfinite(spread):
        raise ValueError("its logits are not finite")
    if isinstance(head, nn.Linear) and spread > 0 and not 1 <= spread <= 6:
        head.weight.mul_(min(2.0 / spread, 10.0))


def _enlarge(model: nn.Module) -> None:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias") and parameter.min() >= 0:
                parameter.fill_(-3.0)  # else a state forgets a token within some others, and faults with it
            if _OWN_START.search(name):
                continue
            convolution = parameter.ndim == 3 and parameter.shape[1] == 1
            if parameter.ndim >= 2 and parameter.numel() > max(parameter.shape) and not convolution:
                std = 0.4 if id(parameter) in embeddings else 1.2 / math.sqrt(parameter.shape[-1])
                parameter.normal_(0.0, std)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.1)
