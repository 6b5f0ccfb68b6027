"""Are the gradients of stale batches aligned, and does a step without their common part lose less?

python -m experiments.46_gradient_alignment.align grid --workers 2   # runs.csv, cosines.csv; resumable
python -m experiments.46_gradient_alignment.align show               # the README's tables, figure.png
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch import nn

from asyncrlhf.learner.updates.updaters import TorchUpdater
from asyncrlhf.sweeps.results import Estimate
from experiments import study
from experiments.resumable import command, run_missing

HERE = Path(__file__).resolve().parent
CAUSES = study.Study.read(HERE.parent / "44_causes")  # its setting, at whose rate lag 16 costs 60% of the reward
METHODS = ("default", "no_weights", "rate_quarter")
LAGS, PROJECTED_LAGS = (0, 4, 16), (0, 16)
SEEDS = range(5)
FIGURES = ["cosine", "cosine_within", "cosine_last_half", "above_half"]
COLUMNS = [*study.RESULTS, *study.METRICS, *FIGURES, "spikes", "seconds", "status"]
SHOWN = ["cosine", "cosine_last_half", "cosine_within", "reward"]
COSINES = ["method", "lag", "project", "seed", "update", "cosine"]


@dataclass(frozen=True)
class Arm:
    """One run. ``project``: each gradient is stripped of its positive part along the one before."""

    method: str
    lag: int
    project: bool
    seed: int

    def overrides(self) -> tuple[str, ...]:
        own = [] if self.method == "rate_quarter" else [f"{study.RATE}={CAUSES.learning_rate}"]
        return *CAUSES.base, *CAUSES.methods[self.method], f"async.lag={self.lag}", *own, f"seed={self.seed}"


def arms() -> list[Arm]:
    plain = [Arm(m, lag, False, s) for s, m, lag in itertools.product(SEEDS, METHODS, LAGS)]
    without = [Arm(m, lag, True, s) for s, m, lag in itertools.product(SEEDS, METHODS, PROJECTED_LAGS)]
    return sorted(plain + without, key=lambda arm: arm.seed)


class Alignment:
    """The cosine of each update's gradient with that of the update before, before clipping: ``cosines``."""

    def __init__(self, project: bool) -> None:
        self.project = project
        self.cosines: list[float] = []
        self._before: torch.Tensor | None = None

    def see(self, module: nn.Module) -> None:
        """Reads, and with ``project`` changes, the gradient of ``module``."""
        parameters = [p for p in module.parameters() if p.grad is not None]
        now = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        if self._before is not None:
            unit = self._before / self._before.norm().clamp(min=1e-30)
            along = float(now @ unit)
            self.cosines.append(along / max(float(now.norm()), 1e-30))
            if self.project and along > 0:
                pieces = unit.split([p.numel() for p in parameters])
                for parameter, piece in zip(parameters, pieces, strict=True):
                    assert parameter.grad is not None
                    parameter.grad -= along * piece.view_as(parameter)
        self._before = now  # as the batch gave it


@contextmanager
def aligned(project: bool) -> Iterator[Alignment]:
    """Meanwhile the gradients of a run in this process are seen."""
    found, original = Alignment(project), TorchUpdater.clip

    def clip(self: TorchUpdater, module: nn.Module) -> torch.Tensor:
        found.see(module)
        return original(self, module)

    TorchUpdater.clip = clip  # type: ignore[method-assign]
    try:
        yield found
    finally:
        TorchUpdater.clip = original  # type: ignore[method-assign]


def run(arm: Arm) -> list[dict[str, Any]]:
    cell = study.Cell(arm.method, arm.lag, 0.0, arm.seed, arm.overrides())
    with aligned(arm.project) as found:
        row, _ = study.run_cell(cell, CAUSES.samples)
    if row["status"] != "done":
        return [row]
    cosines = np.array(found.cosines)
    within, between = cosines[0::2], cosines[1::2]  # a batch makes two updates
    points = [
        asdict(arm) | {"update": int(piece[0] + piece[-1]) + 3, "cosine": between[piece].mean()}
        for piece in np.array_split(np.arange(len(between)), 8)
    ]
    study.append(HERE / "cosines.csv", points, COSINES)
    figures = (between.mean(), within.mean(), between[len(between) // 2 :].mean(), (between > 0.5).mean())
    return [row | dict(zip(FIGURES, map(float, figures), strict=True))]


def values(runs: pd.DataFrame, name: str, **where: Any) -> pd.Series:
    """A figure of the runs of an arm, by seed."""
    for key, value in where.items():
        runs = runs[runs[key] == value]
    return runs.set_index("seed")[name].sort_index()


def said(found: pd.Series) -> str:
    estimate = Estimate.of(list(found))
    return f"{estimate.mean:.3f} ± {estimate.error:.3f}"


def tables(runs: pd.DataFrame) -> str:
    heads = ["", "lag", "cosine between batches", "in the second half", "within a batch", "reward"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, lag in itertools.product(METHODS, LAGS):
        own = [values(runs, name, method=method, lag=lag, project=False) for name in SHOWN]
        lines.append(f"| `{method}` | {lag} | {' | '.join(map(said, own))} |")
    lines += ["", "| | lag | reward | without the common part | difference |", "|---|---|---|---|---|"]
    for method, lag in itertools.product(METHODS, PROJECTED_LAGS):
        plain, without = (values(runs, "reward", method=method, lag=lag, project=p) for p in (False, True))
        lines.append(f"| `{method}` | {lag} | {said(plain)} | {said(without)} | {said(without - plain)} |")
    return "\n".join(lines)


def draw(points: pd.DataFrame, target: Path) -> None:
    """The cosine between batches over the updates, in means of an eighth of the run and over seeds."""
    figure, axes = plt.subplots(1, len(METHODS), figsize=(9.5, 3.2), sharey=True, layout="constrained")
    points = points[~points.project]
    for axis, method in zip(axes, METHODS, strict=True):
        for lag in LAGS:
            own = points[(points.method == method) & (points.lag == lag)]
            curve = own.groupby("update").cosine.mean()
            axis.plot(curve.index, curve, marker="o", markersize=3, label=f"lag {lag}")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(title=method, xlabel="update")
    axes[0].set_ylabel("cosine with the gradient before")
    axes[0].legend()
    figure.savefig(target, dpi=110)


def grid(workers: int) -> None:
    if not (HERE / "cosines.csv").exists():
        study.append(HERE / "cosines.csv", [], COSINES)
    run_missing(arms(), run, HERE / "runs.csv", COLUMNS, ("reward", "cosine", "seconds"), workers)


def show() -> None:
    runs = pd.read_csv(HERE / "runs.csv")
    print(tables(runs[runs.status == "done"]))
    draw(pd.read_csv(HERE / "cosines.csv"), HERE / "figure.png")


if __name__ == "__main__":
    command(__doc__, grid, show)
