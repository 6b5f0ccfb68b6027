"""The report's tables for runs of ``sft`` and ``reward-model``: where their curves begin and end."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrlhf.orchestrator.summary import duration
from asyncrlhf.report.cells import MISSING, Table, spread
from asyncrlhf.report.load import Group, Run

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
