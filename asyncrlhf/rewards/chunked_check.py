"""Which parts of a reward can be read chunk by chunk, told from the checkpoints' configs before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from asyncrlhf.rewards.chunked_passes import static_refusal
from asyncrlhf.rewards.model_loading import build_encoder, policy_ids
from asyncrlhf.rewards.reward_config import RewardConfig, RewardPart
from asyncrlhf.rewards.service_config import RewardModelConfig


@dataclass(frozen=True)
class ChunkOutlook:
    """``possible``: some part can read chunks. ``notes``: a sentence for each thing that a user would not expect."""

    possible: bool
    notes: Sequence[str]


def chunk_outlook(reward: RewardConfig, policy: PreTrainedTokenizerBase) -> ChunkOutlook:
    """Of a reward that :func:`~asyncrlhf.rewards.build_scorer.check_rewards` found in order."""
    models = {name: part for name, part in reward.sources.items() if part.kind == "model"}
    if not models:
        kinds = ", ".join(sorted({part.kind for part in reward.sources.values()}))
        return ChunkOutlook(
            False,
            [
                f"fusion.granularity=chunk needs a causal reward model, and this reward has none (kind {kinds}): it is "
                "scored as with fusion.granularity=rollout."
            ],
        )
    refusals = {name: _refusal(part, reward.key(name), policy) for name, part in models.items()}
    notes = [
        f"fusion.granularity=chunk: the model of {reward.key(name)}.model.path={models[name].model.path} {refusal}, so "
        "it scores whole rollouts, as with fusion.granularity=rollout."
        for name, refusal in refusals.items()
        if refusal is not None
    ]
    return ChunkOutlook(len(notes) < len(models), notes)


def _refusal(part: RewardPart, key: str, policy: PreTrainedTokenizerBase) -> str | None:
    if build_encoder(part.model, key, policy) is not policy_ids:
        return "reads the text in tokens of its own, which do not begin and end where the policy's chunks do"
    return static_refusal(_without_weights(part.model))


def _without_weights(config: RewardModelConfig) -> PreTrainedModel:
    path = Path(config.path).expanduser()
    name = str(path) if path.is_dir() else config.path
    found = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            found, trust_remote_code=config.trust_remote_code
        )
    return model
