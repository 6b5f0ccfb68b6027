"""Draws a study's runs.csv and prints its tables: reward by method and value, and what the last value costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

COLUMNS = ("reward", "greedy", "kl", "ess_fraction_seq")
SPREAD = 0.12  # of a step of the axis: methods stand beside each other, so that their bars can be told apart


def plot(folder: Path, axis: str, methods: Sequence[str], start: float) -> None:
    """``figure.png`` in ``folder``; ``start`` is the reward before training."""
    runs = pd.read_csv(folder / "runs.csv")
    runs = runs[runs.status == "done"]
    shown = [method for method in methods if method in set(runs.method)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), constrained_layout=True)
    values = sorted(runs.value.unique())
    for number, method in enumerate(shown):
        cells = runs[runs.method == method].groupby("value")[["reward", "kl"]].agg(["mean", "std"])
        style = {"color": f"C{number}", "marker": "os^Dv<>Ph*X"[number % 11], "markersize": 5, "linewidth": 1.3}
        places = [values.index(v) + SPREAD * (number / max(1, len(shown) - 1) - 0.5) * 2 for v in cells.index]
        left.errorbar(places, cells.reward["mean"], cells.reward["std"], capsize=2, label=method, **style)
        _path(right, cells, style)
    for axes in (left, right):
        axes.axhline(start, color="grey", linestyle=":", linewidth=1)
        axes.set_ylabel("held-out reward, sampled (dotted: before training)")
        axes.grid(alpha=0.25)
    left.set_xticks(range(len(values)), [str(v) for v in values])
    left.set_xlabel(axis)
    left.set_title("mean and standard deviation over seeds", fontsize=10)
    right.set_xlabel("KL(policy || start), nats a response")
    right.set_xscale("log")
    right.set_title("one point a value of the axis: hollow the first, largest the last", fontsize=10)
    left.legend(fontsize=8, ncols=2)
    figure.savefig(folder / "figure.png", dpi=110)
    for column in COLUMNS:
        print(f"\n{column}\n\n{table(runs, column, shown)}")
    print(f"\nfrom value {values[0]} to {values[-1]}\n\n{change(runs, shown)}")


def _path(axes: Axes, cells: pd.DataFrame, style: dict[str, object]) -> None:
    kl, reward = cells.kl["mean"].to_numpy(), cells.reward["mean"].to_numpy()
    axes.plot(kl, reward, color=style["color"], linewidth=0.8, alpha=0.6)
    for place, (x, y) in enumerate(zip(kl, reward, strict=True)):
        face = "none" if place == 0 else style["color"]
        axes.scatter(x, y, s=20 + 14 * place, marker=style["marker"], edgecolors=style["color"], facecolors=face)


def table(runs: pd.DataFrame, column: str, methods: Sequence[str]) -> str:
    """Markdown: mean and standard deviation over seeds, a row a method, a column a value of the axis."""
    values = sorted(runs.value.unique())
    lines = ["| method | learning rate | " + " | ".join(map(str, values)) + " |", "|" + "---|" * (len(values) + 2)]
    for method in methods:
        mine = runs[runs.method == method]
        stats = mine.groupby("value")[column].agg(["mean", "std"]).reindex(values)
        texts = [f"{mean:.3f} ± {std:.3f}" for mean, std in stats.itertuples(index=False)]
        lines.append(f"| {method} | {mine.learning_rate.iloc[0]:g} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def pilot_table(pilot: pd.DataFrame, methods: Sequence[str]) -> str:
    """Markdown: the pilot's sampled reward, a row a method, a column a learning rate."""
    cells = pilot.pivot(index="method", columns="learning_rate", values="reward").reindex(methods)
    lines = ["| method | " + " | ".join(f"{rate:g}" for rate in cells) + " |", "|" + "---|" * (len(cells.columns) + 1)]
    lines += [f"| {method} | " + " | ".join(f"{r:.3f}" for r in row) + " |" for method, *row in cells.itertuples()]
    return "\n".join(lines)


def change(runs: pd.DataFrame, methods: Sequence[str]) -> str:
    """Markdown: the reward's change from the first value of the axis to the last, with its standard error."""
    first, last = min(runs.value), max(runs.value)
    lines = ["| method | change of reward | standard error |", "|---|---|---|"]
    for method in methods:
        ends = [runs[(runs.method == method) & (runs.value == value)].reward for value in (first, last)]
        error = sum(end.var() / len(end) for end in ends) ** 0.5
        lines.append(f"| {method} | {ends[1].mean() - ends[0].mean():+.3f} | {error:.3f} |")
    return "\n".join(lines)
