"""Loads a pretrained checkpoint's model."""

from __future__ import annotations

import torch
import transformers

from asyncrlhf.data.adapter import add_adapter
from asyncrlhf.data.checkpoint_folder import from_pretrained, load_shape, load_tokenizer
from asyncrlhf.data.data_config import ModelConfig


def load_model(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """The causal language model in ``eval()``; ``dtype`` overrides ``model.dtype`` (master weights in float32)."""
    dtype = dtype or getattr(torch, config.dtype)
    more = config.model_init_kwargs or {}
    model = from_pretrained(transformers.AutoModelForCausalLM, config, dtype=dtype, use_safetensors=True, **more)
    return model.to(device).eval()


def load_policy(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """What the learner trains: the model, or with ``model.lora.r`` an adapter in the frozen model."""
    model = load_model(config, device, dtype)
    return add_adapter(model, config.lora) if config.lora.r else model


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError unless the checkpoint's config and tokenizer load and the adapter fits; reads no weights."""
    shape = load_shape(config)
    load_tokenizer(config)
    if config.lora.r:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
            add_adapter(model, config.lora)
