"""The README's tables and figure, from lag.csv and tools.csv.

python -m experiments.34_episode_staleness.tables
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

HERE = Path(__file__).absolute().parent
CORRECTIONS = ("none", "decoupled", "tis")
TEXT = "{:.3f} ± {:.3f}"


def error(values: pd.Series) -> float:
    """The standard error of the mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5)


def shown(values: pd.Series) -> str:
    return TEXT.format(values.mean(), error(values)) if len(values) > 1 else "-"


def of_lag() -> pd.DataFrame:
    """lag.csv, with the runs at lag 0 for each correction, and what a run's lag cost beside its seed's lag 0."""
    runs = pd.read_csv(HERE / "lag.csv")
    fresh = runs[runs.lag == 0]
    runs = pd.concat([runs[runs.lag > 0], *(fresh.assign(correction=name) for name in CORRECTIONS)])
    start = fresh.set_index(["turns", "seed"])
    own = pd.MultiIndex.from_frame(runs[["turns", "seed"]])
    for column in ("after", "area"):
        runs[f"{column}_cost"] = start[column].reindex(own).to_numpy() - runs[column].to_numpy()
    return runs


def table(runs: pd.DataFrame, column: str) -> str:
    """Markdown: a row a number of turns and a lag, a column a correction."""
    lines = ["| turns | lag | " + " | ".join(CORRECTIONS) + " |", "|" + "---|" * (2 + len(CORRECTIONS))]
    for (turns, lag), cells in runs.groupby(["turns", "lag"]):
        texts = [shown(cells[cells.correction == name][column]) for name in CORRECTIONS]
        lines.append(f"| {turns} | {lag} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def slopes(runs: pd.DataFrame, column: str) -> str:
    """Markdown: the change of a lag's cost for each doubling of the turns: a least-squares line by seed."""
    lags = sorted(lag for lag in runs.lag.unique() if lag)
    lines = ["| correction | " + " | ".join(f"lag {lag}" for lag in lags) + " |", "|" + "---|" * (1 + len(lags))]
    for name in CORRECTIONS:
        texts = []
        for lag in lags:
            cells = runs[(runs.correction == name) & (runs.lag == lag)]
            found = [np.polyfit(np.log2(own.turns), own[column], 1)[0] for _, own in cells.groupby("seed")]
            texts.append(shown(pd.Series(found)))
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def between(runs: pd.DataFrame, column: str) -> str:
    """Lines: how much one correction's runs exceed another's of the same turns, lag and seed; all stale runs."""
    by_run = runs[runs.lag > 0].pivot(index=["turns", "lag", "seed"], columns="correction", values=column)
    pairs = (("decoupled", "none"), ("tis", "none"), ("tis", "decoupled"))
    differences = [(one, other, by_run[one] - by_run[other]) for one, other in pairs]
    return "\n".join(
        f"{one} over {other}: {shown(found)}, more in {(found > 0).sum()} of {len(found)}"
        for one, other, found in differences
    )


def tools_table(runs: pd.DataFrame) -> str:
    """Markdown: seconds per step and the learner's busy share; a row a mode, a column a tool's time."""
    tools = sorted(runs.tool_seconds.unique())
    lines = ["| mode | " + " | ".join(f"{tool:g} s" for tool in tools) + " |", "|" + "---|" * (1 + len(tools))]
    for (bound, concurrency), cells in runs.groupby(["bound", "concurrency"]):
        texts = []
        for tool in tools:
            own = cells[cells.tool_seconds == tool]
            texts.append(f"{shown(own.step_seconds)} s, busy {own.busy.mean():.2f}")
        lines.append(f"| {mode(bound, concurrency)} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def mode(bound: int, concurrency: int) -> str:
    return f"bound {bound}, {concurrency} at a time" if bound else "sync"


def words(runs: pd.DataFrame) -> str:
    """Markdown: SmolLM2's runs by lag and correction, with what the lag cost beside its seed's lag 0."""
    fresh = runs[runs.lag == 0].set_index("seed")
    figures = ["after", "area", "ess_fraction_seq", "behavior_kl", "turns_mean"]
    lines = ["| lag | correction | runs | " + " | ".join([*figures, "after, cost", "area, cost"]) + " |"]
    lines.append("|" + "---|" * (5 + len(figures)))
    for (lag, name), own in runs.groupby(["lag", "correction"]):
        costs = [own.seed.map(fresh[column]) - own[column] for column in ("after", "area")]
        cells = [shown(values) for values in (*(own[column] for column in figures), *costs)]
        lines.append(f"| {lag} | {name} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(lag: pd.DataFrame, tools: pd.DataFrame) -> None:
    figure, axes = plt.subplots(1, 5, figsize=(17, 3.8), constrained_layout=True)
    for place, (turns, own) in zip(axes, lag.groupby("turns"), strict=False):
        draw_lag(place, own)
        place.set_title(f"{turns} turn{'s' if turns > 1 else ''}", fontsize=10)
        place.set_ylim(min(lag.before.min(), lag.after.min()) - 0.03, 1.0)
    axes[0].set_ylabel("share of right answers, held out")
    axes[0].legend(fontsize=8)
    local = tools[tools.runtime == "local"]
    for (bound, concurrency), own in local.groupby(["bound", "concurrency"]):
        mean = own.groupby("tool_seconds").step_seconds.mean()
        dash = "--" if concurrency == 32 and bound else "-"
        label = mode(bound, concurrency)
        axes[4].plot(range(len(mean)), mean, dash, marker="o", markersize=4, color=f"C{bound}", label=label)
    axes[4].set_xticks(range(4), ["0", "0.1", "1", "5"])
    axes[4].set_xlabel("seconds of a tool")
    axes[4].set_ylabel("seconds per step (virtual clock)")
    axes[4].set_yscale("log")
    axes[4].legend(fontsize=7)
    for place in axes:
        place.grid(alpha=0.25)
    figure.savefig(HERE / "figure.png", dpi=100)


def draw_lag(axes: Axes, runs: pd.DataFrame) -> None:
    for number, name in enumerate(CORRECTIONS):
        cells = runs[runs.correction == name].groupby("lag").after
        places = np.arange(cells.ngroups) + 0.08 * (number - 1)
        style = {"capsize": 2, "marker": "os^"[number], "markersize": 4, "label": name}
        axes.errorbar(places, cells.mean(), cells.apply(error), **style)
    lags = sorted(runs.lag.unique())
    axes.axhline(runs.before.mean(), color="grey", linestyle=":", linewidth=1)
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_xlabel("lag")


def main() -> None:
    lag, tools = of_lag(), pd.read_csv(HERE / "tools.csv")
    print(f"before: {lag.groupby('turns').before.mean().to_dict()}")
    for column in ("after", "after_cost", "area", "area_cost", "ess_fraction", "ess_fraction_seq"):
        print(f"\n{column}\n\n{table(lag, column)}")
    for column in ("after", "area"):
        print(f"\ncost of the lag in {column}, for each doubling of the turns\n\n{slopes(lag, f'{column}_cost')}")
        print(f"\n{column}\n\n{between(lag, column)}")
    for runtime, own in tools.groupby("runtime"):
        print(f"\n{runtime}\n\n{tools_table(own)}")
    if (played := HERE / "smollm2.csv").exists():
        print(f"\nSmolLM2-135M\n\n{words(pd.read_csv(played))}")
    draw(lag, tools)


if __name__ == "__main__":
    main()
