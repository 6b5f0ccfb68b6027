"""A reference policy from a checkpoint of its own (``reference.path``), such as the teacher of a distillation."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_shape, load_tokenizer, resolve
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


def check_teacher(policy: ModelConfig, teacher: ModelConfig) -> list[str]:
    """Raise ConfigError unless ``teacher`` is a causal language model for which every id that ``policy`` samples is the
    same token; reads no weights. Returns sentences for the user."""
    setting = f"reference.path={teacher.path}"
    check_causal(teacher, "reference.path")
    check_weights(resolve(teacher.path), "reference.path")
    own, other = load_tokenizer(policy), load_tokenizer(teacher)
    count, rows = sampled_vocabulary(policy, own), int(load_shape(teacher).get_text_config().vocab_size)
    check(
        rows >= count,
        f"{setting} has an embedding of {rows} rows, and model.path={policy.path} samples {count} ids; allowed: a "
        "teacher with the policy's tokens.",
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
