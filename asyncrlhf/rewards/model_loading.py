"""Finds a reward model's checkpoint, refuses an untrained head, and says what the model reads of a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards.service_config import RewardModelConfig
from asyncrlhf.types import IntArray, Rollout

HEAD = "ForSequenceClassification"


def check_reward_model(config: RewardModelConfig, key: str) -> None:
    """Raise ConfigError unless the checkpoint's config says that it is a reward model; reads no weights."""
    found = _load(AutoConfig, config, key)
    named = [str(name) for name in getattr(found, "architectures", None) or []]
    if not any(name.endswith(HEAD) for name in named):
        raise ConfigError(
            f"{key}.model.path={config.path} is a checkpoint of {', '.join(named) or 'no named architecture'}, whose "
            f"score would come from an untrained head; allowed: ...{HEAD} with one label."
        )
    if found.num_labels != 1:
        raise ConfigError(
            f"{key}.model.path={config.path} has {found.num_labels} labels; allowed: a reward model, which has one."
        )


def load_reward_model(config: RewardModelConfig, key: str, device: str) -> PreTrainedModel:
    """The model in ``eval()``; raises ConfigError when a weight is missing, which transformers would fill at random."""
    check_reward_model(config, key)
    dtype = getattr(torch, config.dtype)
    model, report = _load(AutoModelForSequenceClassification, config, key, dtype=dtype, output_loading_info=True)
    missing = sorted(report["missing_keys"]) + [str(entry) for entry in report.get("mismatched_keys", ())]
    if missing:
        raise ConfigError(
            f"{key}.model.path={config.path} lacks {len(missing)} of its model's weights, such as {missing[0]}; "
            "they would be random."
        )
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_reward_tokenizer(config: RewardModelConfig, key: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, config, key)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Where its tokens are the policy's, {key}.model.inputs=ids needs no tokenizer."
        ) from error
    return tokenizer


def _load(auto: Any, config: RewardModelConfig, key: str, **options: Any) -> Any:
    path = Path(config.path).expanduser()
    local = path.is_dir()
    looks_local = config.path.startswith((".", "/", "~")) or config.path.count("/") > 1 or config.path.endswith("/")
    if not local and (looks_local or path.exists()):
        raise ConfigError(f"{key}.model.path={config.path} is no folder; give a checkpoint's folder or a hub name.")
    name = str(path) if local else config.path
    try:
        return auto.from_pretrained(name, trust_remote_code=config.trust_remote_code, **options)
    # The hub client and transformers raise these for whatever is wrong with a name or a folder.
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ConfigError(f"{key}.model.path={config.path} could not be loaded: {reason}.") from error


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
