"""``asyncrlhf sft``, ``reward-model`` and ``preferences``: the stages that end in files for the next one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrlhf.orchestrator.compose import load_config
from asyncrlhf.orchestrator.config import RunConfig

HELP_FLAGS = ("-h", "--help")
SFT = """asyncrlhf sft sft.path=DATA [overrides]: supervised fine-tuning of model.path, by TRL's SFTTrainer

  asyncrlhf sft model.path=BASE sft.path=rows.jsonl run_dir=runs/sft    rows: text; prompt and completion; or messages
  asyncrlhf evaluate model.path=runs/sft/model                          the next stage takes what it made"""
REWARD_MODEL = """asyncrlhf reward-model reward_model.path=DATA [overrides]: a reward model, by TRL's RewardTrainer

  asyncrlhf reward-model model.path=runs/sft/model reward_model.path=pairs.jsonl run_dir=runs/rm
                                                        rows: chosen and rejected, with or without prompt
  asyncrlhf train model.path=runs/sft/model reward.kind=model reward.model.path=runs/rm/model"""
PREFERENCES = """asyncrlhf preferences [overrides]: pairs of model.path's own answers, labelled by reward.*

  asyncrlhf preferences model.path=runs/sft/model preferences.noise=bradley_terry run_dir=runs/pairs
  asyncrlhf reward-model model.path=runs/sft/model reward_model.path=runs/pairs/preferences.jsonl"""


def sft(arguments: Sequence[str]) -> int:
    def run(config: RunConfig) -> tuple[dict[str, Any], str]:
        from asyncrlhf.stages.sft import plain_words, run_sft

        summary = run_sft(config)
        return summary, plain_words(summary)

    return _stage(arguments, SFT, run)


def reward_model(arguments: Sequence[str]) -> int:
    def run(config: RunConfig) -> tuple[dict[str, Any], str]:
        from asyncrlhf.stages.reward_model import plain_words, run_reward_model

        summary = run_reward_model(config)
        return summary, plain_words(summary)

    return _stage(arguments, REWARD_MODEL, run)


def preferences(arguments: Sequence[str]) -> int:
    def run(config: RunConfig) -> tuple[dict[str, Any], str]:
        from asyncrlhf.stages.preferences import run_preferences

        summary = run_preferences(config)
        return summary, json.dumps(summary)

    return _stage(arguments, PREFERENCES, run)


def _stage(arguments: Sequence[str], usage: str, run: Callable[[RunConfig], tuple[Mapping[str, Any], str]]) -> int:
    if any(argument in HELP_FLAGS for argument in arguments):
        print(usage)
        return 0
    summary, words = run(load_config(arguments))
    if os.environ.get("RANK", "0") == "0":  # one of several processes speaks
        print(words)
    return 130 if summary.get("exit_reason") == "interrupted" else 0
