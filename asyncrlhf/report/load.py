"""Reads run directories for the report: metrics as columns, config, summary, and which runs differ only by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Final

import numpy as np
import yaml

from asyncrlhf.config.run_config import heldout_word
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, flatten, read_metrics
from asyncrlhf.sweeps.plan import WITHOUT_EFFECT

# Settings that may differ between two runs of one configuration: their folders and displays.
_NOT_CONFIGURATION = ("seed", *WITHOUT_EFFECT)
# Commands whose folders have no curves, by their files.
_WITHOUT_CURVES = {"preferences.jsonl": "preference data", "evaluation.json": "an evaluation"}
# Metrics that identify the stage, for runs without a summary.
_OF_STAGE = {"mean_token_accuracy": "sft", "min_reward": "reward-model"}
TRAIN = "train"
MULTIRUN_FILE = "multirun.yaml"  # of Hydra, in the folder of `train -m`
# Totals since the run's beginning, which no line of the metrics holds: the metric that each sums up.
SAMPLES: Final = "samples_trained"
TOKENS: Final = "tokens_trained"
_TOTALS = {SAMPLES: "sequences", TOKENS: "response_tokens"}
_MAPPINGS = ("heldout_accuracy", "staleness", "ledger", "reward", "generators")  # of summary.json


@dataclass(frozen=True)
class Run:
    """One run in the report. ``columns`` [S learner steps] hold NaN where a line has no value."""

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
        """The command that created it: ``train``, ``sft`` or ``reward-model``."""
        if self.summary is not None:
            return str(self.summary.get("stage", TRAIN))
        found = (stage for name, stage in _OF_STAGE.items() if {name, f"heldout_{name}"} & self.columns.keys())
        return next(found, TRAIN)

    @property
    def heldout_word(self) -> str:
        """What its held-out figure is: accuracy or reward."""
        get = self.config.get
        penalty = get("reward.missing_eos_penalty", 0) or get("reward.overlong_buffer", 0)
        return heldout_word(get("reward.kind", "task"), get("task.kind", "arithmetic"), penalty)

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The settings that make two runs comparable: all but the seed and the run's folder."""
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
    """Read one run directory, also of an unfinished or killed run. Raises ConfigError if it cannot be read."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give the directory of a run, such as runs/arithmetic/<time>.")
    metrics = path / METRICS_FILE
    if not metrics.is_file():
        for name, what in _WITHOUT_CURVES.items():
            if (path / name).is_file():
                raise ConfigError(f"{path} holds {what} and no curves; give a run of train, sft or reward-model.")
        raise ConfigError(f"{path} holds no {METRICS_FILE}, so it is not a run directory, and holds none.")
    try:
        rows = [row for row in read_metrics(metrics) if "step" in row]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{metrics} cannot be read: {error}.") from None
    if not rows:
        raise ConfigError(f"{metrics} has no complete learner step yet; there is nothing to report.")
    if not all(_is_number(row["step"]) for row in rows):
        raise ConfigError(f"{metrics} has a line whose step is not a number; was it edited by hand?")
    config = _read(path / CONFIG_FILE, _yaml, yaml.YAMLError) or {}
    summary = _read(path / SUMMARY_FILE, json.loads, json.JSONDecodeError)
    for key in _MAPPINGS:
        if not isinstance((summary or {}).get(key) or {}, dict):
            raise ConfigError(f"{path / SUMMARY_FILE} has a {key} that is not a mapping; was it edited by hand?")
    columns = _with_heldout_ends(_with_totals(_columns(rows)), summary)
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
    """All runs of the paths. An error of one run is put into ``unread`` by its path, or raised without ``unread``.
    Raises ConfigError if no run can be read."""
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
    return runs


def is_multirun(path: Path) -> bool:
    """Whether Hydra wrote the folder (``train -m``)."""
    return (Path(path) / MULTIRUN_FILE).is_file()


def missing_jobs(paths: Sequence[Path]) -> dict[str, str]:
    """The jobs of every multirun below the paths that left no run: one sentence each, by the job's folder."""
    found: dict[str, str] = {}
    for folder in sorted({file.resolve().parent for path in map(Path, paths) for file in path.rglob(MULTIRUN_FILE)}):
        for number, choices in enumerate(_job_choices(folder)):
            job = folder / str(number)
            if not (job / METRICS_FILE).is_file():
                said = " ".join(f"{key}={value}" for key, value in choices.items())
                found[str(job)] = f"{job} left no run ({said or 'the only job'})."
    return found


def _job_choices(folder: Path) -> list[dict[str, str]]:
    """The settings of each job that are not all jobs', in Hydra's order; empty if the jobs' folders have other names,
    or another sweeper than Hydra's made the choices."""
    from asyncrlhf.config.compose import sweep_jobs

    try:
        settings = (_read(folder / MULTIRUN_FILE, _yaml, yaml.YAMLError) or {})["hydra"]
        overrides = [str(override) for override in settings["overrides"]["task"]]
        plain = settings["sweep"]["subdir"] == "${hydra.job.num}"
        if not plain or not settings["sweeper"]["_target_"].endswith(".BasicSweeper"):
            return []
        if any(override.startswith("run_dir=") for override in overrides):
            return []
        jobs = sweep_jobs(overrides)
    except (ConfigError, LookupError, TypeError):
        return []
    same = set(jobs[0]).intersection(*jobs)
    return [{key: value for key, _, value in (o.partition("=") for o in job if o not in same)} for job in jobs]


def heldout_measure(runs: Sequence[Run]) -> str:
    """What the runs' held-out figures are: accuracy, or reward if that of any run is one."""
    return "reward" if any(run.heldout_word == "reward" for run in runs) else "accuracy"


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs whose configurations differ at most in the seed, each labelled by its differences."""
    buckets: dict[str, list[Run]] = {}
    for run in runs:
        # A run without a config cannot be shown to equal another one.
        same = json.dumps(run.configuration, sort_keys=True) if run.configuration else str(run.path.resolve())
        key = f"{run.stage} {same}"
        buckets.setdefault(key, []).append(run)
    differing = config_differences([members[0] for members in buckets.values()])
    labels = [_label(members, differing) for members in buckets.values()]
    for index, label in enumerate(labels):
        if labels.count(label) > 1:
            labels[index] = f"{label} ({list(buckets.values())[index][0].label})"
    return [Group(label, tuple(members)) for label, members in zip(labels, buckets.values(), strict=True)]


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings whose values differ between the runs: key to one value per run (None if a run lacks the key)."""
    keys = sorted({key for run in runs for key in run.configuration})
    table = {key: [run.configuration.get(key) for run in runs] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    columns = {}
    for key in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(key) for row in rows]
        if not {type(value) for value in values} <= {int, float, NoneType}:
            values = [value if _is_number(value) else None for value in values]
        if any(value is not None for value in values):
            columns[key] = np.array(values, dtype=np.float64)  # None becomes NaN
    return columns


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_totals(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the totals of samples and response tokens trained on [S]; a rollout counts once per use."""
    totals = {name: np.nancumsum(columns[of]) for name, of in _TOTALS.items() if of in columns}
    return {**columns, **totals}


def _with_heldout_ends(columns: dict[str, np.ndarray], summary: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Add the evaluation before the first step as a point at step 0, and the final one at the last step.

    No learner step's line has them, only the summary.
    """
    ends = (summary or {}).get("heldout_accuracy") or {}
    before, after = (value if _is_number(value := ends.get(end)) else None for end in ("before", "after"))
    if before is None and after is None:
        return columns
    steps = len(columns["step"])
    heldout = columns.get("heldout_accuracy", np.full(steps, np.nan)).copy()
    if after is not None and np.isnan(heldout[-1]):
        heldout[-1] = after
    columns = {**columns, "heldout_accuracy": heldout}
    if before is None or columns["step"][0] <= 0:
        return columns
    first = {"step": 0.0, "wall_time": 0.0, SAMPLES: 0.0, TOKENS: 0.0, "heldout_accuracy": before}
    return {key: np.concatenate([[first.get(key, np.nan)], values]) for key, values in columns.items()}


def _label(members: Sequence[Run], differing: Mapping[str, Sequence[Any]]) -> str:
    """The settings that distinguish the runs. The name of a preset replaces all of its settings."""
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
    return f"{key.removeprefix('async.')}={f'{value:g}' if isinstance(value, float) else value}"


def _yaml(text: str) -> Any:
    """By libyaml if PyYAML has it: a run's config takes a third of a second otherwise."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _read(path: Path, parse: Any, errors: type[Exception]) -> Any:
    if not path.is_file():
        return None
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (errors, OSError, UnicodeDecodeError):
        raise ConfigError(f"{path} cannot be parsed; was it edited by hand?") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a mapping; was it edited by hand?")
    return value
