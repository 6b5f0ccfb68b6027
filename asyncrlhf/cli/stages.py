"""``asyncrlhf sft``, ``reward-model`` and ``preferences``: the stages that end in files for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig

HELP_FLAGS = ("-h", "--help")
SFT = """asyncrlhf sft sft.path=DATA [overrides]: supervised fine-tuning of model.path, by TRL's SFTTrainer

  asyncrlhf sft model.path=BASE sft.path=rows.jsonl run_dir=runs/sft    rows: text; prompt and completion; or messages
  asyncrlhf evaluate model.path=runs/sft/model                          the next stage takes what it made"""
REWARD_MODEL = """asyncrlhf reward-model reward_model.path=DATA [overrides]: a reward model, by TRL's RewardTrainer

  asyncrlhf reward-model model.path=runs/sft/model reward_model.path=pairs.jsonl run_dir=runs/rm
                                                        rows: chosen and rejected, with or without prompt
  asyncrlhf train model.path=runs/sft/model reward.kind=model reward.model.path=runs/rm/model"""
PREFERENCES = """asyncrlhf preferences [overrides]: pairs of model.path's own answers, labelled by reward.*

  asyncrlhf preferences model.path=runs/sft/model preferences=bradley_terry run_dir=runs/pairs
  asyncrlhf reward-model model.path=runs/sft/model reward_model.path=runs/pairs/preferences.jsonl"""


def sft(arguments: Sequence[str]) -> int:
    def run(config: RunConfig) -> tuple[dict[str, Any], str]:
        from asyncrlhf.stages.sft import plain_words, run_sft

        return _trained(run_sft(config), plain_words)

    return _stage(arguments, SFT, run)


def reward_model(arguments: Sequence[str]) -> int:
    def run(config: RunConfig) -> tuple[dict[str, Any], str]:
        from asyncrlhf.stages.reward_model import plain_words, run_reward_model

        return _trained(run_reward_model(config), plain_words)

    return _stage(arguments, REWARD_MODEL, run)


def _trained(summary: dict[str, Any], plain_words: Callable[[Mapping[str, Any]], str]) -> tuple[dict[str, Any], str]:
    if summary["exit_reason"] == "done":
        return summary, plain_words(summary)
    return summary, f"Interrupted after {summary['steps']} steps; checkpoint.resume=auto goes on."


def preferences(arguments: Sequence[str]) -> int:
    def run(config: RunConfig) -> tuple[dict[str, Any], str]:
        from asyncrlhf.stages.preferences import run_preferences

        summary = run_preferences(config)
        console = Console()
        if not console.is_terminal:
            return summary, "\n".join(f"{name}: {value}" for name, value in preference_figures(summary))
        table = Table(title=f"Preferences from {summary['model']}")
        table.add_column("figure")
        table.add_column("value", justify="right", overflow="fold")
        for row in preference_figures(summary):
            table.add_row(*row)
        console.print(table)
        data = f"model.path={summary['model']} reward_model.path={summary['preferences']}"
        return summary, f"Next: asyncrlhf reward-model {data}"

    return _stage(arguments, PREFERENCES, run)


def preference_figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what ``preferences`` shows of its summary."""
    settings = summary["settings"]
    left_out = {
        "cut off": summary["truncated_dropped"],
        "empty": summary["empty_dropped"],
        "without a reward": summary["failed"],
    }
    noise = {
        "none": "none",
        "bradley_terry": f"Bradley-Terry, temperature {settings['temperature']:g}",
        "flip": f"flipped with probability {settings['flip_probability']:g}",
    }
    return [
        ("prompts", f"{summary['prompts']}, {settings['num_generations']} answers each"),
        *((f"answers {why}, left out", str(count)) for why, count in left_out.items() if count),
        ("reward of all answers", f"{summary['reward_mean']:.3f}, standard deviation {summary['reward_std']:.3f}"),
        ("pairs", str(summary["pairs"])),
        ("pairs of equal reward, left out", str(summary["ties_dropped"])),
        ("noise of the labels", noise[settings["noise"]]),
        ("labels that agree with the reward", f"{summary['agreement']:.3f}"),
        ("reward of chosen answers", f"{summary['reward_chosen_mean']:.3f}"),
        ("reward of rejected answers", f"{summary['reward_rejected_mean']:.3f}"),
        ("mean difference of a pair's rewards", f"{summary['margin_mean']:.3f}"),
        ("file", summary["preferences"]),
    ]


def _stage(arguments: Sequence[str], usage: str, run: Callable[[RunConfig], tuple[Mapping[str, Any], str]]) -> int:
    if any(argument in HELP_FLAGS for argument in arguments):
        print(usage)
        return 0
    summary, words = run(load_config(arguments))
    if os.environ.get("RANK", "0") == "0":  # one of several processes speaks
        print(words)
    return 130 if summary.get("exit_reason") == "interrupted" else 0
