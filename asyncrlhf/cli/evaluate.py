"""``asyncrlhf evaluate``: held-out reward, win rate and KL of a model or a run's checkpoint, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrlhf.config.compose import check_words, load_config
from asyncrlhf.config.run_config import RunConfig, from_hydra
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.recorder import CONFIG_FILE

USAGE = """asyncrlhf evaluate [overrides]: answers to the held-out prompts, as tables and one line of JSON

  asyncrlhf evaluate model.path=FOLDER task=prompts task.path=FILE    the overrides of train; greedy answers
  asyncrlhf evaluate run=RUN [key=value]                              a run's newest checkpoint, with its settings
  evaluation=sampled                                                  four answers a prompt at temperature 1
  evaluation.against=FOLDER | answers                                 win rate by reward.*, against a model or the task
  evaluation.reference=FOLDER                                         KL from a model, and the perplexity under it
  run_dir=FOLDER                                                      also write FOLDER/evaluation.json"""


def main(arguments: Sequence[str]) -> int:
    """Reads the same overrides as ``train``. ``run=RUN`` takes the settings of that run and its newest checkpoint; what
    follows are then plain settings, not names of groups. ``run_dir=FOLDER`` also writes ``FOLDER/evaluation.json``."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    named = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    rest = [argument for argument in arguments if not argument.startswith("run=")]
    config = config_of_run(Path(named[-1]), rest) if named else load_config(rest)
    folder = Path(config.run_dir) if config.run_dir else None
    from asyncrlhf.stages.evaluation import evaluate  # here, so that a wrong setting is answered before torch's import

    result = evaluate(config)
    _show(result, config.evaluation.samples_shown)
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def config_of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own config with its newest checkpoint as the model; raises ConfigError where it has none."""
    from asyncrlhf.records.checkpoint import LEARNER_FOLDER, list_checkpoints

    check_words(overrides)
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"run={run} holds no {CONFIG_FILE}; give the directory of a run.")
    found = list_checkpoints(run)
    if not found:
        raise ConfigError(f"run={run} holds no checkpoint; train with checkpoint.every=N to have some.")
    saved = yaml.safe_load((run / CONFIG_FILE).read_text())
    groups = [override for override in overrides if isinstance(saved.get(override.split("=")[0]), dict)]
    if groups:
        key = groups[0].split("=")[0]
        raise ConfigError(f"{groups[0]} names a group, and run={run} has its own; allowed: {key}.NAME=VALUE.")
    own = {"model": {"path": str(found[-1] / LEARNER_FOLDER / "model")}, "run_dir": "", "checkpoint": {"resume": "no"}}
    return from_hydra(OmegaConf.merge(saved, own, OmegaConf.from_dotlist(list(overrides))))


def _show(result: Mapping[str, Any], samples: int) -> None:
    how = f"at temperature {result['temperature']:g}" if result["temperature"] else "greedy"
    console = Console()
    if samples:
        console.print(_sample_table(result, samples, how))
    table = Table(title=f"{result['prompts']} held-out prompts, {result['answers']} answers {how}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _figures(result):
        table.add_row(name, value)
    console.print(table)


def _sample_table(result: Mapping[str, Any], samples: int, how: str) -> Table:
    table = Table(title=f"{result['model']} on {result['prompts']} held-out prompts of {result['task']}, {how}")
    against = "against" in result
    columns = ["prompt", "response", "answer", "reward"]
    for column in [*columns, *(["against", "its reward"] if against else [])]:
        table.add_column(column)
    for sample in result["samples"][:samples]:
        cells = [sample["prompt"], sample["response"], str(sample["answer"]), f"{sample['reward']:.3f}"]
        if against:
            cells += [str(sample["against_response"]), _number(sample["against_reward"])]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the second table, with standard errors where there are any."""
    rows = [("reward", _pair(result, "reward_mean", "reward_standard_error"))]
    rows += [(f"  {name}", _pair(part, "mean", "standard_error")) for name, part in result["reward_parts"].items()]
    rows += [
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
            rows.append(("KL", "needs evaluation.temperature > 0"))
        else:
            rows += [
                (f"KL an answer, {name}", _pair(kl, f"{name}_sequence", f"{name}_sequence_standard_error"))
                for name in ("k1", "k3")
            ]
            rows.append(("KL a token, k1 and k3", f"{_number(kl['k1_token'], 4)}, {_number(kl['k3_token'], 4)}"))
    return rows


def _pair(figures: Mapping[str, Any], mean: str, error: str) -> str:
    return _number(figures[mean]) + (f" ± {figures[error]:.3f}" if figures[error] is not None else "")


def _number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
