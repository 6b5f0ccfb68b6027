"""Checks from a model's config whether it can be divided over the learner's ranks: before any actor starts, and again
when it is divided."""

from __future__ import annotations

import transformers

from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.validation import check


def check_dealt_out(shape: transformers.PretrainedConfig, learner: LearnerConfig) -> None:
    """Raise ConfigError for a size of ``learner.*_parallel_size`` that the model's heads, experts or layers exclude."""
    if learner.tensor_parallel_size > 1:
        check_plan(shape, learner.tensor_parallel_size, "tensor")
        check_heads(shape, learner.tensor_parallel_size)
    if learner.expert_parallel_size > 1:
        check_plan(shape, learner.expert_parallel_size, "expert")
        check_experts(shape, learner.expert_parallel_size)
    if learner.sequence_parallel_size > 1:
        check_heads_of_sequence(shape, learner.sequence_parallel_size)
    if learner.pipeline_parallel_size > 1:
        check_layers(shape.get_text_config().num_hidden_layers, learner.pipeline_parallel_size)


def check_plan(shape: transformers.PretrainedConfig, size: int, name: str) -> None:
    """``name``: tensor or expert."""
    plan = {"tensor": "base_model_tp_plan", "expert": "base_model_ep_plan"}[name]
    check(
        bool(getattr(shape.get_text_config(), plan, None)),
        f"learner.{name}_parallel_size={size}: transformers has no {name}-parallel plan for a model of the kind "
        f"{shape.model_type}; allowed: 1.",
    )


def heads_of(shape: transformers.PretrainedConfig) -> tuple[int, int]:
    """The number of attention heads and of key-value heads."""
    config = shape.get_text_config()
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def check_heads(shape: transformers.PretrainedConfig, size: int) -> None:
    heads, kv_heads = heads_of(shape)
    check(
        heads % size == 0 and kv_heads % size == 0,
        f"learner.tensor_parallel_size={size} cannot deal out this model's {heads} attention heads and {kv_heads} "
        f"key-value heads; allowed: a divisor of both.",
    )


def check_heads_of_sequence(shape: transformers.PretrainedConfig, size: int) -> None:
    heads, kv_heads = heads_of(shape)
    check(
        heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0),
        f"learner.sequence_parallel_size={size} cannot deal out this model's {heads} attention heads and "
        f"{kv_heads} key-value heads; allowed: a divisor of {heads} that divides {kv_heads} or is its multiple.",
    )


def check_experts(shape: transformers.PretrainedConfig, size: int) -> None:
    config = shape.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or size
    check(
        experts % size == 0,
        f"learner.expert_parallel_size={size} cannot deal out this model's {experts} experts; allowed: a divisor.",
    )


def check_layers(layers: int, stages: int) -> None:
    check(
        layers >= stages,
        f"learner.pipeline_parallel_size={stages} is more than the model's {layers} decoder layers.",
    )
