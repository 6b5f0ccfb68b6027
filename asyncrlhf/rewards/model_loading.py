"""Finds a reward model's checkpoint, and refuses whatever would be scored by a head that nobody trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
