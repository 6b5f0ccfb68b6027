"""What a reward model reads of a rollout: the policy's own token ids, or the text in the model's own tokens."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.model_loading import load_reward_tokenizer
from asyncrlhf.rewards.service_config import RewardModelConfig
from asyncrlhf.types import IntArray, Rollout


class Encoder(Protocol):
    def __call__(self, rollout: Rollout) -> IntArray:
        """Token ids [P+L] of prompt and response, without padding."""
        ...


def build_encoder(config: RewardModelConfig, key: str, policy: PreTrainedTokenizerBase) -> Encoder:
    """The encoder that ``inputs`` asks for; raises ConfigError where the checkpoint has no tokenizer or template."""
    if config.inputs == "ids":
        return policy_ids
    own = load_reward_tokenizer(config, key)
    if config.chat_template:
        if not own.chat_template:
            raise ConfigError(
                f"{key}.model.chat_template=true, but the tokenizer of {key}.model.path={config.path} has none."
            )
        return ChatEncoder(own)
    if config.inputs == "auto" and same_tokens(own, policy):
        return policy_ids
    return TextEncoder(own)


def policy_ids(rollout: Rollout) -> IntArray:
    """The very tokens that the policy saw and sampled, its stop token included."""
    return np.concatenate([rollout.prompt.token_ids, rollout.response_ids]).astype(np.int64)


class TextEncoder:
    """Prompt and response as one plain text, and the end token where the response came to its end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rollout: Rollout) -> IntArray:
        ids = list(self._tokenizer(rollout.prompt.text + rollout.response_text).input_ids)
        end = self._tokenizer.eos_token_id
        if rollout.finish_reason == "stop" and end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return np.asarray(ids, dtype=np.int64)


class ChatEncoder:
    """A conversation of two turns, as the model's chat template writes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rollout: Rollout) -> IntArray:
        turns = [
            {"role": "user", "content": rollout.prompt.text},
            {"role": "assistant", "content": rollout.response_text},
        ]
        # As text first: the template writes the special tokens itself.
        rendered: Any = self._tokenizer.apply_chat_template(turns, tokenize=False)
        return np.asarray(self._tokenizer(rendered, add_special_tokens=False).input_ids, dtype=np.int64)


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both give every token the same id, special ones included."""
    return one.get_vocab() == other.get_vocab() and one.all_special_ids == other.all_special_ids
