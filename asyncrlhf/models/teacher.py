"""Reference policies from checkpoints of their own (``reference.path``, ``reference.teachers``), such as a
distillation's teachers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import context_length, load_shape, load_tokenizer, resolve
from asyncrlhf.models.pretrained import check_causal, load_model
from asyncrlhf.models.vocabulary import end_tokens, limit_to, sampled_vocabulary
from asyncrlhf.models.weight_files import check_weights
from asyncrlhf.validation import check


def load_reference(
    policy: ModelConfig, reference: ModelConfig, device: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """The model of ``reference`` as a distribution over the ids that ``policy`` samples."""
    model = load_model(reference, device, dtype)
    limit_to(sampled_vocabulary(policy, load_tokenizer(policy)), model)
    return model


def check_teacher(policy: ModelConfig, teacher: ModelConfig, longest: int, key: str) -> list[str]:
    """Raise ConfigError unless ``teacher``, of the setting ``key``, is a causal language model for texts of ``longest``
    tokens for which every id that ``policy`` samples is the same token; reads no weights. Returns sentences for the
    user."""
    setting = f"{key}={teacher.path}"
    try:
        return _check(policy, teacher, longest, key)
    except ConfigError as error:  # the functions that load a checkpoint know of one setting
        raise ConfigError(str(error).replace(f"model.path={teacher.path}", setting, 1)) from error


def _check(policy: ModelConfig, teacher: ModelConfig, longest: int, key: str) -> list[str]:
    setting = f"{key}={teacher.path}"
    check_causal(teacher, key)
    check_weights(resolve(teacher.path), key)
    own, other = load_tokenizer(policy), load_tokenizer(teacher)
    count, rows = sampled_vocabulary(policy, own), int(load_shape(teacher).get_text_config().vocab_size)
    check(
        rows >= count,
        f"{setting} has an embedding of {rows} rows, and model.path={policy.path} samples {count} ids; allowed: a "
        "teacher with the policy's tokens.",
    )
    context = context_length(teacher)
    check(
        context >= longest,
        f"{setting} has a context of {context} tokens, and a prompt with its answer may have {longest}; "
        "allowed: a teacher with a longer context, or smaller task.max_prompt_length and "
        "generator.max_completion_length.",
    )
    mine, theirs = _tokens(own), _tokens(other)
    unlike = next((place for place in sorted(mine) if place < count and mine[place] != theirs.get(place)), -1)
    check(
        unlike < 0,
        f"{setting} has another tokenizer than model.path={policy.path}: id {unlike} is {theirs.get(unlike)!r} there "
        f"and {mine.get(unlike)!r} here; allowed: a teacher with the policy's tokens.",
    )
    ends, others = end_tokens(policy, own), end_tokens(teacher, other)
    if set(ends) & set(others):
        return []
    return [
        f"{setting} ends its answers with {theirs[others[0]]!r}, and the policy with {mine[ends[0]]!r}: the teacher "
        "will hold back the end of every answer."
    ]


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {place: token for token, place in tokenizer.get_vocab().items()}
