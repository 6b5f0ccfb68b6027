"""The tables of the report: a column a run, and what each stage left."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrlhf.records.summary import (
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
    """Mean and sample standard deviation of those that are known."""
    known = [value for value in found if value is not None]
    if not known:
        return MISSING
    middle = template.format(statistics.fmean(known))
    return f"{middle} ± {template.format(statistics.stdev(known))}" if len(known) > 1 else middle


# Metric -> heading; those that no run has are left out.
_SHOWN = {
    "loss": "loss",
    "heldout_loss": "held-out loss",
    "heldout_mean_token_accuracy": "held-out token accuracy",
    "heldout_accuracy": "held-out accuracy",
    "heldout_margin": "held-out margin",
}


def stage_results(runs: Sequence[Run]) -> Table:
    """One row a run, each metric's first and last value."""
    shown = _of(runs)
    header = ["run", "seed", "steps", *(_SHOWN[name] for name in shown), "wall time", "ended"]
    return Table("Results", header, [_row(run, shown) for run in runs])


def stage_seeds(groups: Sequence[Group]) -> Table:
    """One row a configuration, the last values over its seeds."""
    shown = _of([run for group in groups for run in group.runs])
    rows = [
        [
            group.label,
            str(len(group.runs)),
            *(spread([_last(run, name) for run in group.runs], "{:.3f}") for name in shown),
        ]
        for group in groups
    ]
    header = ["configuration", "runs", *(f"{_SHOWN[name]}, last" for name in shown)]
    return Table("Mean over seeds ± one standard deviation", header, rows)


def _of(runs: Sequence[Run]) -> list[str]:
    return [name for name in _SHOWN if any(run.column(name) is not None for run in runs)]


def _row(run: Run, shown: Sequence[str]) -> list[str]:
    wall = run.rows[-1].get("wall_time")
    return [
        run.label,
        MISSING if run.seed is None else str(run.seed),
        f"{run.rows[-1]['step']:,}",
        *(_ends(run, name) for name in shown),
        MISSING if wall is None else duration(wall),
        run.summary.get("exit_reason", MISSING) if run.summary else "no summary (running or killed)",
    ]


def _known(run: Run, name: str) -> list[float]:
    values = run.column(name)
    return [] if values is None else [float(value) for value in values if value == value]


def _ends(run: Run, name: str) -> str:
    known = _known(run, name)
    return f"{known[0]:.3f} → {known[-1]:.3f}" if known else MISSING


def _last(run: Run, name: str) -> float | None:
    known = _known(run, name)
    return known[-1] if known else None


def build_tables(runs: Sequence[Run], groups: Sequence[Group]) -> list[Table]:
    """The tables that these runs call for, in the order to show them."""
    several = any(len(group.runs) > 1 for group in groups)
    if runs[0].stage == TRAIN:
        tables = [*([_seeds(groups)] if several else []), _results(runs), _ledger(runs), *_replicas(runs)]
    else:
        tables = [*([stage_seeds(groups)] if several else []), stage_results(runs)]
    differences = config_differences(runs)
    if differences:
        rows = [[key, *(MISSING if value is None else str(value) for value in row)] for key, row in differences.items()]
        tables.append(Table("Settings that differ", ["setting", *(run.label for run in runs)], rows))
    return tables


def _results(runs: Sequence[Run]) -> Table:
    header = [
        "run",
        "seed",
        "steps",
        "reward, first",
        "reward, last",
        "held-out",
        "wall time",
        "samples/s",
        "staleness mean",
        "max",
        "learner idle",
        "generators idle",
        "ended",
    ]
    return Table("Results", header, [_result_row(run) for run in runs])


def _result_row(run: Run) -> list[str]:
    reward = reward_ends(run.rows)
    heldout = run.column("heldout_accuracy")
    solved = [float(v) for v in heldout if v == v] if heldout is not None else []
    wall = run.rows[-1].get("wall_time")
    worst = max(values(run.rows, "staleness_max"), default=None)
    return [
        run.label,
        MISSING if run.seed is None else str(run.seed),
        f"{run.rows[-1]['step']:,}",
        number(reward["first"], "{:.3f}"),
        number(reward["last"], "{:.3f}"),
        f"{solved[0]:.3f} → {solved[-1]:.3f}" if solved else MISSING,
        MISSING if wall is None else duration(wall),
        number(time_weighted_mean(run.rows, "samples_per_second"), "{:,.1f}"),
        number(mean(values(run.rows, "staleness_mean")), "{:.2f}"),
        number(worst, "{:.0f}"),
        number(time_weighted_mean(run.rows, "learner_idle_fraction"), "{:.0%}"),
        number(time_weighted_mean(run.rows, "generator_idle_fraction"), "{:.0%}"),
        run.summary.get("exit_reason", MISSING) if run.summary else "no summary (running or killed)",
    ]


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
    """One row a generator, for the runs that had several."""
    rows = [
        [run.label, name, *replica_cells(figures)] for run in runs for name, figures in replica_means(run.rows).items()
    ]
    return [Table("Generators", ["run", "generator", *REPLICA_COLUMNS], rows)] if rows else []


def _seeds(groups: Sequence[Group]) -> Table:
    header = ["configuration", "runs", "reward, last", "held-out, last", "wall time, s", "samples/s"]
    picks: list[Callable[[Run], float | None]] = [
        lambda run: reward_ends(run.rows)["last"],
        _last_heldout,
        lambda run: run.rows[-1].get("wall_time"),
        lambda run: time_weighted_mean(run.rows, "samples_per_second"),
    ]
    formats = ["{:.3f}", "{:.3f}", "{:,.1f}", "{:,.1f}"]
    rows = [
        [
            group.label,
            str(len(group.runs)),
            *(spread([pick(r) for r in group.runs], f) for pick, f in zip(picks, formats, strict=True)),
        ]
        for group in groups
    ]
    return Table("Mean over seeds ± one standard deviation", header, rows)


def _last_heldout(run: Run) -> float | None:
    heldout = run.column("heldout_accuracy")
    return None if heldout is None else float(heldout[heldout == heldout][-1])


def _reasons(counts: dict[str, Any]) -> str:
    if not counts:
        return "0"
    return f"{sum(counts.values()):,} ({', '.join(f'{reason} {count:,}' for reason, count in counts.items())})"
