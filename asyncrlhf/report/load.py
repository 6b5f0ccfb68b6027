"""Reads run directories for the report: metrics as columns, config, summary, and which runs differ only by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.recorder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, read_metrics

# What may differ between two runs of one configuration: where they lie and what they show.
_NOT_CONFIGURATION = ("seed", "run_dir", "name", "logging", "checkpoint", "sweep")
# What a command leaves whose folder has no curves, by its file.
_WITHOUT_CURVES = {"preferences.jsonl": "preference data", "evaluation.json": "an evaluation"}
# Metrics that give the stage away, for runs that have no summary yet.
_OF_STAGE = {"mean_token_accuracy": "sft", "min_reward": "reward-model"}
TRAIN = "train"


@dataclass(frozen=True)
class Run:
    """One run as the report sees it. ``columns`` [S learner steps] hold NaN where a line has no value."""

    path: Path
    label: str
    rows: list[dict[str, Any]]
    columns: dict[str, np.ndarray]  # each [S]
    config: dict[str, Any]  # flat: "async.max_staleness" -> 2
    summary: dict[str, Any] | None  # None: the run is still going, or was killed

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def stage(self) -> str:
        """The command that made it: ``train``, ``sft`` or ``reward-model``."""
        if self.summary is not None:
            return str(self.summary.get("stage", TRAIN))
        found = (stage for name, stage in _OF_STAGE.items() if {name, f"heldout_{name}"} & self.columns.keys())
        return next(found, TRAIN)

    @property
    def configuration(self) -> dict[str, Any]:
        """The settings that make two runs comparable: all but the seed and where the run lies."""
        return {key: value for key, value in self.config.items() if key.split(".")[0] not in _NOT_CONFIGURATION}

    def column(self, name: str) -> np.ndarray | None:
        """The metric over the steps [S], or None when the run never logged it."""
        values = self.columns.get(name)
        return values if values is not None and np.isfinite(values).any() else None


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, in the order given."""

    label: str
    runs: tuple[Run, ...]


def load_run(path: Path) -> Run:
    """Read one run directory; a run that is still going or was killed is fine. Raises ConfigError otherwise."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give the directory of a run, such as runs/arithmetic/<time>.")
    metrics = path / METRICS_FILE
    if not metrics.is_file():
        for name, what in _WITHOUT_CURVES.items():
            if (path / name).is_file():
                raise ConfigError(f"{path} holds {what} and no curves; give a run of train, sft or reward-model.")
        raise ConfigError(f"{path} holds no {METRICS_FILE}, so it is no run directory, and holds none.")
    rows = [row for row in read_metrics(metrics) if "step" in row]
    if not rows:
        raise ConfigError(f"{metrics} has no complete learner step yet; there is nothing to report.")
    config = _read(path / CONFIG_FILE, yaml.safe_load, yaml.YAMLError) or {}
    summary = _read(path / SUMMARY_FILE, json.loads, json.JSONDecodeError)
    columns = _with_heldout_ends(_columns(rows), summary)
    resolved = path.resolve()
    return Run(path, f"{resolved.parent.name}/{resolved.name}", rows, columns, flatten(config), summary)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories that the paths name: a run itself, or all runs below a folder, each once, in order."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        below = [] if (path / METRICS_FILE).is_file() else sorted(f.parent for f in path.rglob(METRICS_FILE))
        for run in below or [path]:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def load_runs(paths: Sequence[Path], unread: dict[str, str] | None = None) -> list[Run]:
    """All runs of the paths. Why one cannot be read is put into ``unread`` by its path, or raised where none is given.
    Raises ConfigError when no run can be read, and for runs of several stages, whose curves mean different things under
    one name."""
    runs: list[Run] = []
    for path in find_runs(paths):
        try:
            runs.append(load_run(path))
        except ConfigError as error:
            if unread is None:
                raise
            unread[str(path)] = str(error)
    if not runs:
        raise ConfigError(next(iter((unread or {}).values()), "no run was named; give one or several run directories."))
    other = next((run for run in runs if run.stage != runs[0].stage), None)
    if other is not None:
        raise ConfigError(
            f"{runs[0].path} is a run of {runs[0].stage} and {other.path} one of {other.stage}, whose curves do not "
            "compare; give runs of one stage."
        )
    return runs


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs whose configurations agree in everything but the seed, each group labelled by what sets it apart."""
    buckets: dict[str, list[Run]] = {}
    for run in runs:
        # A run without a config cannot be shown to equal another one.
        key = json.dumps(run.configuration, sort_keys=True) if run.configuration else str(run.path.resolve())
        buckets.setdefault(key, []).append(run)
    differing = config_differences([members[0] for members in buckets.values()])
    labels = [_label(members, differing) for members in buckets.values()]
    for index, label in enumerate(labels):
        if labels.count(label) > 1:
            labels[index] = f"{label} ({list(buckets.values())[index][0].label})"
    return [Group(label, tuple(members)) for label, members in zip(labels, buckets.values(), strict=True)]


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings whose values differ between the runs: key to one value a run (None where a run lacks the key)."""
    keys = sorted({key for run in runs for key in run.configuration})
    table = {key: [run.configuration.get(key) for run in runs] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if _is_number(value))
    return {
        key: np.array([float(row[key]) if _is_number(row.get(key)) else np.nan for row in rows], dtype=np.float64)
        for key in keys
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_heldout_ends(columns: dict[str, np.ndarray], summary: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Add the evaluation before the first step as a point at step 0, and the one at the end at the last step.

    Both belong to no learner step's line, so that only the summary knows them.
    """
    ends = (summary or {}).get("heldout_accuracy") or {}
    before, after = ends.get("before"), ends.get("after")
    if before is None and after is None:
        return columns
    steps = len(columns["step"])
    heldout = columns.get("heldout_accuracy", np.full(steps, np.nan)).copy()
    if after is not None and np.isnan(heldout[-1]):
        heldout[-1] = after
    columns = {**columns, "heldout_accuracy": heldout}
    if before is None or columns["step"][0] <= 0:
        return columns
    first = {"step": 0.0, "wall_time": 0.0, "heldout_accuracy": before}
    return {key: np.concatenate([[first.get(key, np.nan)], values]) for key, values in columns.items()}


def _label(members: Sequence[Run], differing: Mapping[str, Sequence[Any]]) -> str:
    """What sets the runs apart. A preset that is named stands for all of its settings."""
    if not differing:
        return members[0].label if len(members) == 1 else Path(members[0].label).parent.name
    configuration = members[0].configuration
    named = {key.rpartition(".")[0] for key in differing if key.endswith(".name")}
    said = [key for key in differing if key.rpartition(".")[0] not in named or key.endswith(".name")]
    parts = [_said(key, configuration.get(key)) for key in said]
    return ", ".join(parts) if len(parts) <= 4 else members[0].label


def _said(key: str, value: Any) -> str:
    if key.endswith(".name"):
        return str(value)
    return f"{key.removeprefix('async.')}={value}"


def _read(path: Path, parse: Any, errors: type[Exception]) -> Any:
    if not path.is_file():
        return None
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except errors:
        raise ConfigError(f"{path} cannot be parsed; was it edited by hand?") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a mapping; was it edited by hand?")
    return value
