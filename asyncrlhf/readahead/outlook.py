"""Decides from the settings and the checkpoints' configs, before weights are loaded, which models can read ahead."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.models.checkpoint_folder import load_shape
from asyncrlhf.readahead.readings import past_refusal, reading_refusal
from asyncrlhf.rewards.model import build_encoder, is_causal, load, policy_ids
from asyncrlhf.rewards.reward_config import RewardConfig, RewardPart

ASKED = "fusion.granularity=chunk"
WHOLE = "as with fusion.granularity=rollout"


def fusion_in_force(config: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[RunConfig, list[str]]:
    """``config``, with ``fusion.granularity=rollout`` if no model can read ahead, and a sentence for each that cannot
    although configured to. The rewards are already checked; ``tokenizer`` is the policy's."""
    if not config.fusion.reads_ahead:
        return config, []
    possible, notes = reward_outlook(config.reward, tokenizer)
    refused = reference_note(config)
    reference = config.reference_reads_ahead and refused is None
    notes = [] if reference and not config.reward_reads_ahead else notes
    if not possible and not reference:
        config = replace(config, fusion=replace(config.fusion, granularity="rollout"))
    return config, [*notes, *([] if refused is None else [refused])]


def reward_outlook(reward: RewardConfig, policy: transformers.PreTrainedTokenizerBase) -> tuple[bool, list[str]]:
    """Whether some part of a reward can read ahead, and a sentence for each model that cannot."""
    models = {name: part for name, part in reward.sources.items() if part.kind == "model"}
    if not models:
        kinds = ", ".join(sorted({part.kind for part in reward.sources.values()}))
        return False, [
            f"{ASKED} needs a causal reward model, and this reward has none (kind {kinds}): it is scored {WHOLE}."
        ]
    refusals = {name: _refusal(part, reward.key(name), policy) for name, part in models.items()}
    notes = [
        f"{ASKED}: the model of {reward.key(name)}.model.path={models[name].model.path} {refusal}, so it scores whole "
        f"rollouts, {WHOLE}."
        for name, refusal in refusals.items()
        if refusal is not None
    ]
    return len(notes) < len(models), notes


def _refusal(part: RewardPart, key: str, policy: transformers.PreTrainedTokenizerBase) -> str | None:
    if build_encoder(part.model, key, policy) is not policy_ids:
        return "has its own tokenizer, whose tokens do not align with the policy's chunks"
    shape = load(transformers.AutoConfig, part.model, key)
    with torch.device("meta"):
        build = transformers.AutoModelForSequenceClassification.from_config
        model = build(shape, trust_remote_code=part.model.trust_remote_code)
    return reading_refusal(model) if is_causal(model) else "is not a causal model with a linear head"


def reference_note(config: RunConfig) -> str | None:
    """A sentence for the user if the settings ask the reference service to read ahead and it cannot; else None."""
    if not config.fusion.reads_ahead or not config.reference_served:
        return None
    if config.generator.truncated:
        return (
            f"{ASKED}: the reference model reads whole rollouts, {WHOLE}, because truncated sampling (generator.top_p, "
            "generator.top_k, generator.min_p) tells only with the whole rollout which tokens it kept."
        )
    refusal = past_refusal(load_shape(config.model))
    model = f"{ASKED}: the reference model of model.path={config.model.path}"
    return None if refusal is None else f"{model} {refusal}, so it reads whole rollouts, {WHOLE}."
