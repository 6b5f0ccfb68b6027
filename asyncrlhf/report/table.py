"""The tables of the report: one column per run, and the results of each stage."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrlhf.records.show.summary import (
    REPLICA_COLUMNS,
    duration,
    mean,
    replica_cells,
    replica_means,
    reward_ends,
    time_weighted_mean,
    values,
)
from asyncrlhf.report.load import TRAIN, Group, Run, config_differences

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def number(value: float | None, template: str) -> str:
    return MISSING if value is None else template.format(value)


def spread(found: Sequence[float | None], template: str) -> str:
    """Mean and sample standard deviation of the known values."""
    known = [value for value in found if value is not None]
    if not known:
        return MISSING
    middle = template.format(statistics.fmean(known))
    return f"{middle} ± {template.format(statistics.stdev(known))}" if len(known) > 1 else middle


# Metric -> heading, for the stages; those that no run has are left out.
_SHOWN = {
    "loss": "loss",
    "heldout_loss": "held-out loss",
    "heldout_mean_token_accuracy": "held-out token accuracy",
    "heldout_accuracy": "held-out accuracy",
    "heldout_margin": "held-out margin",
}


def _ends(run: Run, name: str) -> str:
    """A metric's first and last value."""
    known = _known(run, name)
    return f"{known[0]:.3f} → {known[-1]:.3f}" if known else MISSING


def _last(run: Run, name: str) -> float | None:
    known = _known(run, name)
    return known[-1] if known else None


def _known(run: Run, name: str) -> list[float]:
    column = run.column(name)
    return [] if column is None else [float(value) for value in column if value == value]


def _wall(run: Run) -> float | None:
    return run.rows[-1].get("wall_time")


def _wall_words(run: Run) -> str:
    wall = _wall(run)
    return MISSING if wall is None else duration(wall)


# Of training runs: heading -> the run's cell.
_RESULTS: Mapping[str, Callable[[Run], str]] = {
    "reward, first": lambda run: number(reward_ends(run.rows)["first"], "{:.3f}"),
    "reward, last": lambda run: number(reward_ends(run.rows)["last"], "{:.3f}"),
    "held-out": partial(_ends, name="heldout_accuracy"),
    "wall time": _wall_words,
    "samples/s": lambda run: number(time_weighted_mean(run.rows, "samples_per_second"), "{:,.1f}"),
    "staleness mean": lambda run: number(mean(values(run.rows, "staleness_mean")), "{:.2f}"),
    "max": lambda run: number(max(values(run.rows, "staleness_max"), default=None), "{:.0f}"),
    "learner idle": lambda run: number(time_weighted_mean(run.rows, "learner_idle_fraction"), "{:.0%}"),
    "generators idle": lambda run: number(time_weighted_mean(run.rows, "generator_idle_fraction"), "{:.0%}"),
}
# Of training runs: heading -> the value of a run that is averaged over seeds, and how it is written.
_SEEDS: Mapping[str, tuple[Callable[[Run], float | None], str]] = {
    "reward, last": (lambda run: reward_ends(run.rows)["last"], "{:.3f}"),
    "held-out, last": (partial(_last, name="heldout_accuracy"), "{:.3f}"),
    "wall time, s": (_wall, "{:,.1f}"),
    "samples/s": (lambda run: time_weighted_mean(run.rows, "samples_per_second"), "{:,.1f}"),
}


def build_tables(runs: Sequence[Run], groups: Sequence[Group]) -> list[Table]:
    """The tables for these runs, in the order to show them."""
    results, seeds = _RESULTS, _SEEDS
    if runs[0].stage != TRAIN:
        shown = [name for name in _SHOWN if any(run.column(name) is not None for run in runs)]
        results = {**{_SHOWN[name]: partial(_ends, name=name) for name in shown}, "wall time": _wall_words}
        seeds = {f"{_SHOWN[name]}, last": (partial(_last, name=name), "{:.3f}") for name in shown}
    tables = [_over_seeds(groups, seeds)] if any(len(group.runs) > 1 for group in groups) else []
    tables.append(_results(runs, results))
    if runs[0].stage == TRAIN:
        tables += [_ledger(runs), *_replicas(runs), *_attempts(runs)]
    differences = config_differences([group.runs[0] for group in groups])
    if differences:
        rows = [[key, *(MISSING if value is None else str(value) for value in row)] for key, row in differences.items()]
        tables.append(Table("Settings that differ", ["setting", *(group.label for group in groups)], rows))
    return tables


def _results(runs: Sequence[Run], columns: Mapping[str, Callable[[Run], str]]) -> Table:
    """One row per run."""
    rows = [
        [
            run.label,
            MISSING if run.seed is None else str(run.seed),
            f"{run.rows[-1]['step']:,}",
            *(column(run) for column in columns.values()),
            run.summary.get("exit_reason", MISSING) if run.summary else "no summary (running or killed)",
        ]
        for run in runs
    ]
    return Table("Results", ["run", "seed", "steps", *columns, "ended"], rows)


def _over_seeds(groups: Sequence[Group], columns: Mapping[str, tuple[Callable[[Run], float | None], str]]) -> Table:
    """One row per configuration."""
    rows = [
        [
            group.label,
            str(len(group.runs)),
            *(spread([pick(run) for run in group.runs], template) for pick, template in columns.values()),
        ]
        for group in groups
    ]
    return Table("Mean over seeds ± one standard deviation", ["configuration", "runs", *columns], rows)


def _ledger(runs: Sequence[Run]) -> Table:
    header = ["run", "admitted", "trained", "dropped", "failed", "left", "adds up"]
    rows = []
    for run in runs:
        ledger = (run.summary or {}).get("ledger")
        if not ledger:
            rows.append([run.label, *[MISSING] * 6])
            continue
        dropped, failed = _reasons(ledger["dropped"]), _reasons(ledger["failed"])
        counts = [f"{ledger['admitted']:,}", f"{ledger['trained']:,}", dropped, failed, f"{ledger['left']:,}"]
        rows.append([run.label, *counts, "yes" if ledger["adds_up"] else "NO"])
    return Table("Rollouts: admitted = trained + dropped + failed + left", header, rows)


def _replicas(runs: Sequence[Run]) -> list[Table]:
    """One row per generator, for runs with several."""
    rows = [
        [run.label, name, *replica_cells(figures)] for run in runs for name, figures in replica_means(run.rows).items()
    ]
    return [Table("Generators", ["run", "generator", *REPLICA_COLUMNS], rows)] if rows else []


def _attempts(runs: Sequence[Run]) -> list[Table]:
    """One row per start of a run, for runs that began more than once."""
    rows = [
        [run.label, attempt["started"], f"{attempt['from_step']:,}", attempt.get("after") or MISSING]
        for run in runs
        if len(found := (run.summary or {}).get("attempts", ())) > 1
        for attempt in found
    ]
    return [Table("Attempts", ["run", "began", "after step", "since the one before ended"], rows)] if rows else []


def _reasons(counts: dict[str, Any]) -> str:
    if not counts:
        return "0"
    return f"{sum(counts.values()):,} ({', '.join(f'{reason} {count:,}' for reason, count in counts.items())})"
