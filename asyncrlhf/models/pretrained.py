"""Loads a pretrained checkpoint's model: whole, or without weights beside the files that hold these."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.adapter import add_adapter
from asyncrlhf.models.checkpoint_folder import from_pretrained, load_shape, load_tokenizer, resolve
from asyncrlhf.models.converted import quantisation, refuse_missing_weights
from asyncrlhf.models.routes import Routers
from asyncrlhf.models.vocabulary import end_tokens, limit_vocabulary
from asyncrlhf.models.weight_files import WeightFiles, check_weights, forget_heads, more_heads, tied_names
from asyncrlhf.validation import check, did_you_mean


def load_model(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """The causal language model in ``eval()``; ``dtype`` overrides ``model.dtype`` (master weights in float32). Raises
    ConfigError for a missing weight: transformers would initialise it randomly."""
    dtype = dtype or getattr(torch, config.dtype)
    more = config.model_init_kwargs or {}
    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True, **more}
    model, report = from_pretrained(transformers.AutoModelForCausalLM, config, **options)
    refuse_missing_weights(report, f"model.path={config.path}")
    forget_heads(model.config)
    return model.to(device).eval()


def load_sampled(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """As :func:`load_model`, for log-probs: with a note of which ids it is a distribution over."""
    model = load_model(config, device, dtype)
    limit_vocabulary(config, model)
    return model


def load_policy(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """The model that the learner trains: the whole model, or with ``model.lora.r`` an adapter in the frozen model."""
    model = load_sampled(config, device, dtype)
    return add_adapter(model, config.lora) if config.lora.r else model


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError unless the checkpoint's config and tokenizer load and the adapter fits; reads no weights."""
    shape = load_shape(config)
    method = quantisation(shape.to_dict())
    check(
        not method,
        f"model.path={config.path} holds quantised weights ({method}), which cannot train; give the original "
        "checkpoint, or one that transformers' model.dequantize() and save_pretrained wrote.",
    )
    check_causal(config, "model.path")
    end_tokens(config, load_tokenizer(config))
    check_weights(resolve(config.path), "model.path")
    _check_keywords(config, shape)
    if config.lora.r:
        width = shape.get_text_config().hidden_size
        check(
            config.lora.r <= width,
            f"model.lora.r={config.lora.r} is over the model's hidden size; allowed: at most {width}.",
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
            add_adapter(model, config.lora)


def check_causal(config: ModelConfig, key: str) -> None:
    """Raise ConfigError, naming the setting ``key``, unless the checkpoint's model generates text."""
    shape = load_shape(config)
    own_code = config.trust_remote_code and "AutoModelForCausalLM" in (getattr(shape, "auto_map", None) or {})
    check(
        own_code or (type(shape) in transformers.AutoModelForCausalLM._model_mapping and not shape.is_encoder_decoder),
        f"{key}={config.path} has the model type {shape.model_type}, which does not generate text; allowed: a "
        "causal language model.",
    )


def check_routers(config: ModelConfig) -> None:
    """Raise ConfigError unless the model has experts whose choice can be reported and followed; reads no weights."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            load_shape(config), trust_remote_code=config.trust_remote_code
        )
    Routers(model)


def _check_keywords(config: ModelConfig, shape: transformers.PretrainedConfig) -> None:
    """Arguments that are neither of ``from_pretrained`` nor in the model's config reach the model's constructor,
    which accepts none. A checkpoint's own code may accept some."""
    if not config.model_init_kwargs or config.trust_remote_code:
        return
    loads = transformers.PreTrainedModel.from_pretrained, transformers.AutoModelForCausalLM.from_pretrained
    known = {name for load in loads for name in inspect.signature(load).parameters}
    known |= {name for load in loads for name in re.findall(r'kwargs\.\w+\(\s*"(\w+)"', inspect.getsource(load))}
    for name in config.model_init_kwargs:
        check(
            name in known or hasattr(shape, name),
            f"model.model_init_kwargs.{name} is known neither to transformers' from_pretrained nor to "
            f"{type(shape).__name__}{did_you_mean(name, {*known, *shape.to_dict()})}.",
        )


def load_blank(config: ModelConfig, dtype: torch.dtype) -> tuple[transformers.PreTrainedModel, WeightFiles] | None:
    """The model in ``eval()``, with its parameters on the device ``meta`` and its computed buffers, and the files
    with the parameters; None if only transformers can load it.

    That is so for hub names, arguments of ``from_pretrained``, tensors that transformers renames, splits or joins
    while loading (fused experts, quantised weights), and a checkpoint that lacks some.
    """
    folder, shape = Path(resolve(config.path)), load_shape(config)
    if config.model_init_kwargs or not folder.is_dir() or getattr(shape, "quantization_config", None):
        return None
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "dtype": dtype}
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(shape, **options)
    model.tie_weights()  # again: a parameter on ``meta`` is replaced by a new object each time it is set
    files = WeightFiles(folder)
    persistent = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    read = files.names - tied_names(model).keys() - set(more_heads(files.names, shape))
    if persistent or {name for name, _ in model.named_parameters()} != read:
        return None
    forget_heads(model.config)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval(), files
