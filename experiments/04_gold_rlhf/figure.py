"""Draws the study: gold over steps, KL and wall-clock, and over-optimisation; prints its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

OVEROPTIMISED = "overoptimised"
STYLES = {"sync": "-", "one_step": "--", "async": ":"}
SHARE = 0.9  # of the gain that the synchronous runs make: the gold reward at which times are compared
SMOOTH = 3  # points of a curve


def plot(folder: Path) -> None:
    """``figure.png`` in ``folder`` out of its CSV files. Where an algorithm has no grid its runs on Ray stand in."""
    clock = complete(read(folder, "clock_curves"))
    runs = with_stand_ins(complete(read(folder, "runs")), complete(read(folder, "clock_runs")))
    curves = with_stand_ins(complete(read(folder, "curves")), clock)
    figure, axes = plt.subplots(2, 2, figsize=(13, 9.5), constrained_layout=True)
    normal = curves[curves.algorithm != OVEROPTIMISED]
    lines(axes[0, 0], normal, "step", "gold")
    axes[0, 0].set(xlabel="learner step", ylabel="gold reward", title="gold over steps, mean over seeds")
    over_kl(axes[0, 1], normal, read(folder, "best_of_n"))
    too_far = curves[curves.algorithm == OVEROPTIMISED]
    overoptimisation(axes[1, 0], too_far)
    axes[1, 0].set_visible(len(too_far) > 0)
    if len(clock):
        lines(axes[1, 1], clock, "wall_time", "gold")
    axes[1, 1].set_visible(len(clock) > 0)
    axes[1, 1].set(xlabel="seconds of training, on Ray", ylabel="gold reward", title="gold over wall-clock")
    for one in axes.flat:
        one.grid(alpha=0.25)
    figure.savefig(folder / "figure.png", dpi=110)
    print(f"\nmean and standard deviation over seeds of the last steps\n\n{table(runs)}")
    if len(clock):
        print(f"\nseconds to {SHARE:.0%} of the gain of sync\n\n{times(clock)}")


def with_stand_ins(grid: pd.DataFrame, clock: pd.DataFrame) -> pd.DataFrame:
    """The grid's rows, and the clock's of algorithms that it has none of."""
    missing = clock[~clock.algorithm.isin(grid.algorithm)]
    return pd.concat([rows for rows in (grid, missing) if len(rows)] or [grid])


def read(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    return pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=["algorithm", "mode", "seed"])


def complete(rows: pd.DataFrame) -> pd.DataFrame:
    """For each algorithm the rows of the seeds that every mode of it has run, so that modes compare over the same."""
    kept = []
    for algorithm, cell in rows.groupby("algorithm", sort=False):
        common = set.intersection(*(set(mode.seed) for _, mode in cell.groupby("mode")))
        kept.append(cell[cell.seed.isin(common)])
        if left_out := sorted(set(cell.seed) - common):
            print(f"{algorithm}: seeds {left_out} have not been run in every mode and are left out.")
    return pd.concat(kept) if kept else rows


def lines(axes: Axes, curves: pd.DataFrame, x: str, y: str) -> None:
    """One line an algorithm (colour) and mode (dashes): the mean over seeds."""
    for number, algorithm in enumerate(unique(curves.algorithm)):
        for mode in unique(curves[curves.algorithm == algorithm]["mode"]):
            mean = average(curves[(curves.algorithm == algorithm) & (curves["mode"] == mode)])
            label = f"{algorithm}, {mode}"
            axes.plot(
                mean[x], mean[y].rolling(SMOOTH, min_periods=1).mean(), STYLES[mode], color=f"C{number}", label=label
            )
    axes.legend(fontsize=7, ncols=2)


def over_kl(axes: Axes, curves: pd.DataFrame, best: pd.DataFrame) -> None:
    """The frontier of Gao et al. 2022: gold against the distance from the SFT model, sqrt(KL)."""
    for number, algorithm in enumerate(unique(curves.algorithm)):
        for mode in unique(curves["mode"]):
            mean = average(curves[(curves.algorithm == algorithm) & (curves["mode"] == mode)])
            distance = np.sqrt((mean.kl * mean.length).clip(lower=0))
            axes.plot(distance, mean.gold, "." if mode == "sync" else "x", color=f"C{number}", markersize=3)
    best = best[best.seed.isin(set(curves.seed))]
    if len(best):
        mean = best.groupby("n").mean()
        axes.plot(np.sqrt(mean.kl), mean.gold, "k-o", markersize=3, label="best of n, no training")
        axes.legend(fontsize=7)
    axes.set(xlabel="sqrt(KL to the SFT model, nats an answer)", ylabel="gold reward")
    axes.set_title("dots: sync; crosses: with lag; colours as on the left")


def overoptimisation(axes: Axes, curves: pd.DataFrame) -> None:
    """Proxy and gold of the runs whose KL hardly counts."""
    if not len(curves):
        return
    mean = average(curves)
    axes.plot(mean.step, mean.gold.rolling(SMOOTH, min_periods=1).mean(), color="C3", label="gold (left)")
    axes.set(xlabel="learner step", ylabel="gold reward", title="hardly any KL: the proxy rises, gold turns down")
    beside = axes.twinx()
    beside.plot(mean.step, mean.proxy.rolling(SMOOTH, min_periods=1).mean(), color="C0", label="proxy (right)")
    beside.set_ylabel("proxy reward")
    axes.legend(loc="lower left")
    beside.legend(loc="lower right")


def average(curves: pd.DataFrame) -> pd.DataFrame:
    """Point by point, over seeds."""
    point = curves.groupby("seed").cumcount()
    return curves.select_dtypes("number").groupby(point).mean()


def table(runs: pd.DataFrame) -> str:
    rows = [
        "| algorithm | mode | seeds | gold | peak of gold | proxy | KL, nats a token | length |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (algorithm, mode), cell in runs.groupby(["algorithm", "mode"], sort=False):
        figures = [spread(cell[name]) for name in ("gold", "gold_peak", "proxy", "kl", "length")]
        rows.append(f"| {algorithm} | {mode} | {len(cell)} | {' | '.join(figures)} |")
    return "\n".join(rows)


def times(curves: pd.DataFrame) -> str:
    """For each seed the first time at which the smoothed gold reaches the bar that its own synchronous run sets."""
    modes = unique(curves["mode"])
    rows = [
        f"| algorithm | seed | gold | {' | '.join(modes)} | async / sync |",
        "|---|---|---|" + "---|" * (len(modes) + 1),
    ]
    for (algorithm, seed), cell in curves.groupby(["algorithm", "seed"], sort=False):
        if set(cell["mode"]) != set(modes):
            continue  # its runs are not all there yet
        smooth = {m: smoothed(cell[cell["mode"] == m]) for m in modes}
        start, end = smooth["sync"].gold.iloc[0], smooth["sync"].gold.iloc[-1]
        bar = start + SHARE * (end - start)
        found = {m: first_time(curve, bar) for m, curve in smooth.items()}
        ratio = found.get("async", float("nan")) / found["sync"]
        shown = " | ".join("never" if np.isnan(v) else f"{v:.1f}" for v in found.values())
        rows.append(f"| {algorithm} | {seed} | {bar:.3f} | {shown} | {ratio:.2f} |")
    return "\n".join(rows)


def smoothed(curve: pd.DataFrame) -> pd.DataFrame:
    return curve.assign(gold=curve.gold.rolling(SMOOTH, min_periods=1).mean())


def first_time(curve: pd.DataFrame, bar: float) -> float:
    reached = curve[curve.gold >= bar]
    return float(reached.wall_time.iloc[0]) if len(reached) else float("nan")


def spread(values: pd.Series) -> str:
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}" if len(values) > 1 else f"{values.mean():.3f}"


def unique(values: Iterable[str]) -> Sequence[str]:
    return list(dict.fromkeys(values))
