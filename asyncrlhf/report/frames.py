"""Runs and sweeps as data frames: the results of the Python API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints
from asyncrlhf.records.write.recorder import (
    CONFIG_FILE,
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    flatten,
    read_metrics,
    read_summary,
)
from asyncrlhf.records.write.rollout_rows import EVALUATIONS_FOLDER
from asyncrlhf.report import load
from asyncrlhf.sweeps.plan import WITHOUT_EFFECT
from asyncrlhf.sweeps.record import is_sweep
from asyncrlhf.sweeps.results import read_results
from asyncrlhf.sweeps.sentences import figures, sentences
from asyncrlhf.validation import check


@dataclass(frozen=True)
class Run:
    """One run directory. Every property reads the present files, so that an unfinished run can be followed."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The resolved settings by their dotted names: ``run.config["async.max_staleness"]``."""
        return flatten(yaml.safe_load((self.path / CONFIG_FILE).read_text()))

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty until the run has ended."""
        return read_summary(self.path) or {}

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per learner step, one column per metric."""
        return pd.DataFrame(read_metrics(self.path / METRICS_FILE))

    @property
    def rollouts(self) -> pd.DataFrame:
        """One row per ended rollout: prompt, response, reward, versions, staleness and end state."""
        return pd.read_parquet(self.path / ROLLOUTS_FOLDER)

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row per answer of the held-out evaluations: step, set, prompt, response, answer and reward."""
        folder = self.path / EVALUATIONS_FOLDER
        check(folder.is_dir(), f"{self.path} holds no {EVALUATIONS_FOLDER}: none was made, or logging.rollouts=false.")
        return pd.read_parquet(folder)

    @property
    def model(self) -> Path:
        """The newest checkpoint's model, for ``train(model=run.model)`` and ``from_pretrained``. Raises ConfigError
        without a checkpoint."""
        found = list_checkpoints(self.path)
        check(found, f"{self.path} holds no checkpoint: it has not ended, or had checkpoint.at_end=false.")
        return found[-1] / LEARNER_FOLDER / "model"

    def report(self) -> Path:
        """Draw the run's HTML report; returns its path."""
        from asyncrlhf.report.html import build_report  # plotly: a second

        return build_report([self.path])

    def __repr__(self) -> str:
        summary = self.summary
        if not summary:
            return f"Run({str(self.path)!r}, going on or killed)"
        return f"Run({str(self.path)!r}, {summary['exit_reason']}, {summary['steps']} steps)"


class Runs(Sequence[Run]):
    """Several runs, in the order given."""

    def __init__(self, runs: Sequence[Run], unread: Mapping[str, str]) -> None:
        self._runs = tuple(runs)
        self.unread = dict(unread)  # path to the reason

    def __getitem__(self, index: Any) -> Any:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @property
    def differing(self) -> list[str]:
        """The settings in which the runs differ, the seed among them."""
        return _differing([run.config for run in self._runs])

    @property
    def metrics(self) -> pd.DataFrame:
        """All runs' metrics in one table, with the columns ``run`` and every setting that differs."""

        frames = [run.metrics.assign(**facts) for run, facts in zip(self._runs, self._facts(), strict=True)]
        return pd.concat(frames, ignore_index=True)

    @property
    def summary(self) -> pd.DataFrame:
        """One row per run: differing settings, exit reason, first and last reward, held-out accuracy, staleness,
        time."""
        return pd.DataFrame(
            [{**facts, **_figures(run.summary)} for run, facts in zip(self._runs, self._facts(), strict=True)]
        )

    def _facts(self) -> list[dict[str, Any]]:
        configs = [run.config for run in self._runs]
        keys = _differing(configs)
        return [
            {"run": str(run.path), **{key: _cell(config.get(key)) for key in keys}}
            for run, config in zip(self._runs, configs, strict=True)
        ]

    def __repr__(self) -> str:
        return f"Runs({list(self._runs)!r})"


@dataclass(frozen=True)
class Sweep:
    """The result of ``sweep``; ``path`` is its folder."""

    path: Path

    @property
    def runs(self) -> Runs:
        """The last attempt of each finished job."""
        return load_runs(self.path)

    @property
    def sentences(self) -> list[str]:
        """The sweep's results in sentences, with standard errors."""
        return sentences(read_results(self.path))

    @property
    def table(self) -> pd.DataFrame:
        """One row per configuration: means over the seeds, and their standard errors (NaN for a single seed)."""
        return pd.DataFrame([figures(cell) for cell in read_results(self.path).cells])


@dataclass(frozen=True)
class Evaluation:
    """``figures``: the content of evaluation.json; ``samples``: the answers shown, one row each."""

    figures: dict[str, Any]
    samples: pd.DataFrame


def load_runs(*paths: str | Path) -> Runs:
    """Every run below these folders; of a sweep its finished jobs. Unreadable runs are listed in ``unread``. Raises
    ConfigError if none can be read."""
    unread: dict[str, str] = {}
    given = [Path(path).expanduser() for path in paths]
    below = [run for path in given for run in (read_results(path).runs if is_sweep(path) else [path])]
    return Runs([Run(run.path) for run in load.load_runs(below, unread)], unread)


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = sorted({key for config in configs for key in config if key.split(".")[0] not in WITHOUT_EFFECT})
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    if not summary:
        return {"exit_reason": None}
    reward, heldout = summary.get("reward") or {}, summary.get("heldout_accuracy") or {}
    return {
        "exit_reason": summary["exit_reason"],
        "steps": summary["steps"],
        "reward_first": reward.get("first"),
        "reward_last": reward.get("last"),
        "heldout_before": heldout.get("before"),
        "heldout_after": heldout.get("after"),
        "staleness_mean": (summary.get("staleness") or {}).get("mean"),
        "wall_seconds": summary["wall_seconds"],
    }
