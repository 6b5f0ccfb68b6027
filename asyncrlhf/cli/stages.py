"""``asyncrlhf sft``, ``reward-model``, ``preferences`` and ``evaluate``: the stages around training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from asyncrlhf.cli.first_look import check_model_path, first_look
from asyncrlhf.config.compose import changed, check_words, load_config
from asyncrlhf.config.conversion import from_hydra
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.last_words import by_signal
from asyncrlhf.records.read.settings import recorded_settings
from asyncrlhf.redaction import hidden_settings
from asyncrlhf.validation import typed_path

SAMPLES_SHOWN = 5  # answers on the terminal: a look at what the model does; evaluation.json has all of them
SFT = """asyncrlhf sft sft.path=DATA [overrides]: supervised fine-tuning of model.path, by TRL's SFTTrainer

  asyncrlhf sft model.path=BASE sft.path=rows.jsonl run_dir=runs/sft    rows: text; prompt and completion; or messages
  asyncrlhf evaluate model.path=runs/sft/model                          the next stage takes its model"""
REWARD_MODEL = """asyncrlhf reward-model reward_model.path=DATA [overrides]: a reward model, by TRL's RewardTrainer

  asyncrlhf reward-model model.path=runs/sft/model reward_model.path=pairs.jsonl run_dir=runs/rm
                                                        rows: chosen and rejected, with or without prompt
  asyncrlhf train model.path=runs/sft/model reward.kind=model reward.model.path=runs/rm/model"""
PREFERENCES = """asyncrlhf preferences [overrides]: pairs of model.path's own answers, labelled by reward.*

  asyncrlhf preferences model.path=runs/sft/model preferences=bradley_terry run_dir=runs/pairs
  asyncrlhf reward-model model.path=runs/sft/model reward_model.path=runs/pairs/preferences.jsonl"""
EVALUATE = """asyncrlhf evaluate [overrides]: answers to the held-out prompts, as tables and one line of JSON

  asyncrlhf evaluate model.path=FOLDER task=prompts task.path=FILE    the overrides of train; greedy answers
  asyncrlhf evaluate run=RUN [key=value]                              a run's newest checkpoint, with its settings
  evaluation=sampled                                                  four answers per prompt at temperature 1
  evaluation.against=FOLDER | answers                                 win rate by reward.*, against a model or the task
  evaluation.reference=FOLDER                                         KL from a model, and the perplexity under it
  evaluation.sets={NAME:{path:DATA,split:test}}                       more data than the task's own, by name
  evaluation.pass_k=[1,4]                                             the chance that one of k answers is right
  run_dir=FOLDER                                                      also write FOLDER/evaluation.json"""


def sft(arguments: Sequence[str]) -> int:
    config = _config(arguments, SFT, "sft")
    _first_look(config, config.sft.path, "sft.path")
    from asyncrlhf.stages.sft import plain_words, run_sft

    return _tell(run_sft(config), plain_words)


def reward_model(arguments: Sequence[str]) -> int:
    config = _config(arguments, REWARD_MODEL, "reward_model")
    _first_look(config, config.reward_model.path, "reward_model.path")
    from asyncrlhf.stages.reward_model import plain_words, run_reward_model

    return _tell(run_reward_model(config), plain_words)


def _config(arguments: Sequence[str], usage: str, group: str) -> RunConfig:
    _answer_help(arguments, usage, group)
    return load_config(arguments)


def _first_look(config: RunConfig, path: str, key: str) -> None:
    from asyncrlhf.stages.data import first_look as look_at_rows

    look_at_rows(path, key)
    check_model_path(config)


def _answer_help(arguments: Sequence[str], usage: str, group: str) -> None:
    """Print the command's help, if asked for. ``group``: the settings of this command alone."""
    if "-h" in arguments or "--help" in arguments:
        from asyncrlhf.cli.settings_help import settings_help

        print(f"{usage}\n\n{settings_help([group])}\n\nAll settings: asyncrlhf train --help")
        raise SystemExit(0)


def _tell(summary: Mapping[str, Any], plain_words: Callable[[Mapping[str, Any]], str]) -> int:
    """Print a stage's results, in one of several processes only; returns the exit code."""
    done = summary["exit_reason"] == "done"
    stopped = f"Interrupted after {summary['steps']} steps; checkpoint.resume=auto continues."
    if os.environ.get("RANK", "0") == "0":
        print(plain_words(summary) if done else stopped)
    return 0 if done else by_signal()


def preferences(arguments: Sequence[str]) -> int:
    config = _config(arguments, PREFERENCES, "preferences")
    first_look(config)
    from asyncrlhf.stages.preferences import run_preferences

    summary = run_preferences(config)
    console, figures = Console(), preference_figures(summary)
    if console.is_terminal:
        console.print(_two_columns(f"Preferences from {summary['model']}", figures))
        print(f"Next: asyncrlhf reward-model model.path={summary['model']} reward_model.path={summary['preferences']}")
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures))
    return 0


def _two_columns(title: str, figures: Sequence[tuple[str, str]]) -> Table:
    table = Table("figure", Column("value", justify="right", overflow="fold"), title=title or None)
    for row in figures:
        table.add_row(*row)
    return table


def preference_figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The displayed names and values of the summary of ``preferences``."""
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


def evaluate(arguments: Sequence[str]) -> int:
    """Held-out reward, win rate and KL of a model or a run's checkpoint, as tables and as JSON.

    Reads the same overrides as ``train``. ``run=RUN`` takes the settings of that run and its newest checkpoint; further
    overrides are then plain settings, not names of groups. ``run_dir=FOLDER`` also writes ``FOLDER/evaluation.json``.
    """
    _answer_help(arguments, EVALUATE, "evaluation")
    named = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    rest = [argument for argument in arguments if not argument.startswith("run=")]
    config = config_of_run(typed_path(named[-1]), rest) if named else load_config(rest)
    folder = Path(config.run_dir) if config.run_dir else None
    first_look(config)
    from asyncrlhf.stages import evaluation  # here, so that a wrong setting is answered before torch's import

    result = evaluation.evaluate(config)
    sets = result.get("sets", {})
    _show(result)
    for name, found in sets.items():
        _show(found, f"{name}: ")
    plain = {name: _without_samples(found) for name, found in sets.items()}
    print(json.dumps({**_without_samples(result), **({"sets": plain} if sets else {})}))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def config_of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own config with its newest checkpoint as the model; raises ConfigError if it has none."""
    from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints

    check_words(overrides)
    saved = recorded_settings(f"run={run}", run)
    found = list_checkpoints(run)
    if not found:
        raise ConfigError(f"run={run} holds no checkpoint: it has not ended, or had checkpoint.at_end=false.")
    groups = [override for override in overrides if isinstance(saved.get(override.split("=")[0]), dict)]
    if groups:
        key = groups[0].split("=")[0]
        raise ConfigError(f"{groups[0]} names a group, and run={run} has its own; allowed: {key}.NAME=VALUE.")
    given = [override.partition("=")[0].lstrip("+") for override in overrides]
    for key in hidden_settings(saved):
        if key not in given:
            raise ConfigError(f"run={run} does not show the value of {key}, which is secret; give {key}=VALUE again.")
    own = {"model": {"path": str(found[-1] / LEARNER_FOLDER / "model")}, "run_dir": "", "checkpoint": {"resume": "no"}}
    merged = OmegaConf.merge(saved, own)
    assert isinstance(merged, DictConfig)
    return from_hydra(changed(merged, overrides))


def _without_samples(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "samples"}


def _show(result: Mapping[str, Any], name: str = "") -> None:
    how = f"at temperature {result['temperature']:g}" if result["temperature"] else "greedy"
    console = Console()
    # The title is a line of its own: a table would break it at its own width.
    print(f"{result['model']} on {result['prompts']} held-out prompts of {result['task']}, {how}")
    console.print(_sample_table(result))
    title = f"{name}{result['prompts']} held-out prompts, {result['answers']} answers {how}"
    print(title)
    console.print(_two_columns("", _figures(result)))


def _sample_table(result: Mapping[str, Any]) -> Table:
    against = "against" in result
    columns = ["prompt", "response", "answer", "reward", *(["against", "its reward"] if against else [])]
    table = Table(*columns)
    for sample in result["samples"][:SAMPLES_SHOWN]:
        cells = [sample["prompt"], sample["response"], str(sample["answer"]), f"{sample['reward']:.3f}"]
        if against:
            cells += [str(sample["against_response"]), _number(sample["against_reward"])]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the second table, with standard errors if there are any."""
    rows = [
        ("reward", _pair(result, "reward_mean", "reward_standard_error")),
        *((f"  {name}", _pair(part, "mean", "standard_error")) for name, part in result["reward_parts"].items()),
        *(
            (key.replace("_at_", "@"), _pair(result, key, f"{key}_standard_error"))
            for key in result
            if key.startswith("pass_at_") and not key.endswith("_error")
        ),
        *(
            (name, _number(result[key]))
            for name, key in (
                ("turns", "turns_mean"),
                ("tool calls", "tool_calls_mean"),
                ("  failed", "tool_failures_mean"),
            )
            if key in result
        ),
        ("response length", _number(result["response_length_mean"])),
        ("cut off", _number(result["truncation_rate"])),
    ]
    if result["failed"]:
        rows.append(("answers without a reward", str(result["failed"])))
    if "against" in result:
        rows += [
            (f"win rate against {result['against']}", _pair(result, "win_rate", "win_rate_standard_error")),
            ("  ties", _number(result["tie_rate"])),
            ("  its reward", _pair(result, "against_reward_mean", "against_reward_standard_error")),
        ]
    if "reference" in result:
        rows.append((f"perplexity under {result['reference']}", _number(result["perplexity"])))
        kl = result["kl"]
        if kl is None:
            return [*rows, ("KL", "needs evaluation.temperature > 0")]
        for name in ("k1", "k3"):
            rows.append((f"KL an answer, {name}", _pair(kl, f"{name}_sequence", f"{name}_sequence_standard_error")))
        rows.append(("KL a token, k1 and k3", f"{_number(kl['k1_token'], 4)}, {_number(kl['k3_token'], 4)}"))
    return rows


def _pair(figures: Mapping[str, Any], mean: str, error: str) -> str:
    return _number(figures[mean]) + (f" ± {figures[error]:.3f}" if figures[error] is not None else "")


def _number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
