"""Ranks the methods of the leaderboard from its CSV files, and writes what docs/choosing.md and the README say of it.

    python -m experiments.36_leaderboard.table          # ranking.csv, figure.png, the sweep, docs/choosing.md

Every comparison is between runs of one seed. Errors are standard errors over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from experiments.study import Study, read_rows

HERE = Path(__file__).absolute().parent
DEFAULT = "decoupled_grpo"
START = 0.211  # held-out reward before training, sampled
GOAL = 0.33  # half of what the best runs gain
BATCH = 128
PAGE = HERE.parents[1] / "docs" / "choosing.md"
SWEEP = HERE.parents[1] / "conf" / "experiment" / "leaderboard.yaml"
BEGIN, END = "<!-- leaderboard: begin -->\n", "<!-- leaderboard: end -->\n"


def complete(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the seeds with which every method ran at every lag; a failed run earned nothing."""
    cells = len(runs[["method", "value"]].drop_duplicates())
    counts = runs.groupby("seed").size()
    return runs[runs.seed.isin(counts.index[counts == cells])].fillna({"reward": 0.0})


def paired(runs: pd.DataFrame, lags: Sequence[int]) -> pd.DataFrame:
    """[seeds, methods] the mean reward over ``lags``."""
    chosen = runs[runs.value.isin(lags)]
    return chosen.pivot_table(index="seed", columns="method", values="reward", aggfunc="mean")


def error(values: pd.Series | np.ndarray) -> float:
    values = np.asarray(values)
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def samples_to_goal(curves: pd.DataFrame, updates_a_step: int = 2) -> pd.DataFrame:
    """[methods x lags] the samples on which a policy had trained when its own samples first earned GOAL, mean over the
    runs that got there, and the share of runs that did. A batch at lag L was sampled L steps before it trained."""
    found = []
    for (method, lag, seed), curve in curves.groupby(["method", "value", "seed"]):
        reached = curve[curve.reward_mean >= GOAL]["update"]
        steps = reached.min() / updates_a_step - lag if len(reached) else np.nan
        found.append({"method": method, "value": lag, "seed": seed, "samples": steps * BATCH})
    return pd.DataFrame(found)


def ranking(runs: pd.DataFrame, curves: pd.DataFrame, methods: Sequence[str]) -> pd.DataFrame:
    """A row a method, the best first: reward at each lag with its error, what is kept of lag 0's, the mean over the
    stale lags and its difference to the default's, collapses, ESS, spikes and samples to GOAL at lag 4."""
    runs = complete(runs)
    curves = samples_to_goal(curves[curves.seed.isin(runs.seed.unique())])
    lags = sorted(runs.value.unique())
    stale = paired(runs, [lag for lag in lags if lag])
    rows = []
    for method in (m for m in methods if m in stale):
        own = runs[runs.method == method]
        row: dict[str, object] = {"method": method}
        start = own[own.value == lags[0]].set_index("seed").reward
        for lag in lags:
            rewards = own[own.value == lag].set_index("seed").reward
            row |= {f"lag_{lag}": rewards.mean(), f"lag_{lag}_error": error(rewards)}
            if lag:
                ratio = rewards.mean() / start.mean()
                row |= {f"kept_{lag}": ratio, f"kept_{lag}_error": error((rewards - ratio * start) / start.mean())}
        difference = stale[method] - stale[DEFAULT]
        row |= {"stale": stale[method].mean(), "stale_error": error(stale[method])}
        row |= {"lead": difference.mean(), "lead_error": error(difference)}
        late = own[own.value > 0]
        row |= {"collapsed": float((late.reward < START).mean()), "spikes": late.spikes.mean()}
        at_four = own[own.value == 4]
        row |= {"ess_4": at_four.ess_fraction_seq.mean(), "learning_rate": own.learning_rate.iloc[0]}
        reached = curves[(curves.method == method) & (curves.value == 4)].samples
        row |= {"samples_4": reached.mean(), "reached_4": float(reached.notna().mean())}
        rows.append(row)
    return pd.DataFrame(rows).sort_values("stale", ascending=False, ignore_index=True)


def tied_with_first(runs: pd.DataFrame, ranked: pd.DataFrame) -> list[str]:
    """The methods behind the first one by less than two standard errors of the difference, seed by seed."""
    runs = complete(runs)
    stale = paired(runs, [lag for lag in sorted(runs.value.unique()) if lag])
    best = ranked.method[0]
    behind = {m: stale[best] - stale[m] for m in ranked.method[1:]}
    return [method for method, gap in behind.items() if gap.mean() < 2 * error(gap)]


def table(ranked: pd.DataFrame) -> str:
    """Markdown of the ranking."""
    lines = [
        "| | preset | lag 0 | lag 1 | lag 4 | lag 16 | kept at 4 | kept at 16 | stale mean | against the default | "
        "collapsed | ESS at 4 | samples to 0.33 at 4 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place, row in ranked.iterrows():
        lags = " | ".join(f"{row[f'lag_{lag}']:.3f} ± {row[f'lag_{lag}_error']:.3f}" for lag in (0, 1, 4, 16))
        kept = " | ".join(f"{100 * row[f'kept_{lag}']:.0f} ± {100 * row[f'kept_{lag}_error']:.0f}%" for lag in (4, 16))
        mean = f"{row.stale:.3f} ± {row.stale_error:.3f}"
        lead = "" if row.method == DEFAULT else f"{row.lead:+.3f} ± {row.lead_error:.3f}"
        samples = f"{row.samples_4:,.0f}" if row.reached_4 == 1 else f"{100 * row.reached_4:.0f}% of runs reach it"
        lines.append(
            f"| {int(place) + 1} | `{row.method}` | {lags} | {kept} | {mean} | {lead} | "
            f"{100 * row.collapsed:.0f}% | {row.ess_4:.2f} | {samples} |"
        )
    return "\n".join(lines) + "\n"


def sentences(runs: pd.DataFrame, ranked: pd.DataFrame) -> list[str]:
    """What the ranking says, in sentences."""
    seeds = complete(runs).seed.nunique()
    first, tied = ranked.iloc[0], tied_with_first(runs, ranked)
    own = ranked[ranked.method == DEFAULT].iloc[0]
    place = int(ranked.index[ranked.method == DEFAULT][0]) + 1
    better = [r.method for r in ranked.itertuples() if r.lead > 2 * r.lead_error]
    worse = [r.method for r in ranked.itertuples() if r.lead < -2 * r.lead_error]
    gone = [r.method for r in ranked.itertuples() if r.lag_16 < START]
    said = [
        f"{len(ranked)} presets, lags 0, 1, 4 and 16, {seeds} seeds each, each preset at its own learning rate.",
        f"The first is {_names([first.method])}: {first.stale:.3f} ± {first.stale_error:.3f} in the mean of the stale "
        f"lags, {START:.2f} before training.",
        f"Less than two errors behind it, so not told apart: {_names(tied)}." if tied else "",
        f"The default, {_names([DEFAULT])}, is number {place} with {own.stale:.3f} ± {own.stale_error:.3f}.",
        f"More than two errors above the default: {_names(better)}."
        if better
        else "None is more than two errors above the default.",
        f"More than two errors below the default: {_names(worse)}." if worse else "",
        f"At lag 16 these end below where they began: {_names(gone)}." if gone else "",
    ]
    return [sentence for sentence in said if sentence]


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{method}`" for method in methods)


def part(runs: pd.DataFrame, ranked: pd.DataFrame) -> str:
    """The part of docs/choosing.md that these figures make."""
    lines = "\n".join(f"- {sentence}" for sentence in sentences(runs, ranked))
    return f"{lines}\n\n{table(ranked)}"


def sweep(study: Study) -> str:
    """conf/experiment/leaderboard.yaml: the same runs by `asyncrlhf sweep`, a part for each learning rate."""
    rates, lags = study.rates(), ",".join(map(str, study.values))
    lines = [
        "# @package _global_",
        "# Presets with a ratio at exact lags, each at its own learning rate. experiments/36_leaderboard made this",
        "# file, and runs the same faster, without a process for each run:",
        "# asyncrlhf sweep experiment=leaderboard",
        "defaults:",
        "  - staleness_quick",
        "  - _self_",
        "",
        "name: leaderboard",
        "algorithm:",
        "  num_iterations: 1",
        "sweep:",
        f"  seeds: {len(study.seeds)}",
        "  parts:",
        "    quality: null",
        "    speed: null",
    ]
    for number, rate in enumerate(sorted(set(rates.values()))):
        names = ",".join(method for method in study.methods if rates[method] == rate)
        lines += [
            f"    rate_{number + 1}:",
            "      overrides:",
            "        - runtime=local",
            "        - async=fixed_lag",
            f"        - async.lag={lags}",
            f"        - learner.learning_rate={rate:g}",
            f"        - algorithm={names}",
        ]
    return "\n".join(lines) + "\n"


def draw(ranked: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 0.28 * len(ranked) + 1.2), constrained_layout=True)
    rows = np.arange(len(ranked))[::-1]
    for number, lag in enumerate((0, 1, 4, 16)):
        style = {"fmt": "o", "markersize": 4, "color": f"C{number}", "elinewidth": 1}
        axes.errorbar(ranked[f"lag_{lag}"], rows, xerr=ranked[f"lag_{lag}_error"], label=f"lag {lag}", **style)
    axes.axvline(START, color="grey", linestyle=":", linewidth=1)
    axes.set_yticks(rows, [f"{m} (default)" if m == DEFAULT else m for m in ranked.method], fontsize=8)
    axes.set_xlabel("held-out reward after 80 steps, mean and standard error over seeds (dotted: before training)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """(runs, ranking)."""
    runs, study = read_rows(HERE / "runs.csv"), Study.read(HERE)
    return runs, ranking(runs, pd.read_csv(HERE / "curves.csv"), list(study.methods))


def main() -> None:
    runs, ranked = read()
    SWEEP.write_text(sweep(Study.read(HERE)))
    ranked.to_csv(HERE / "ranking.csv", index=False, float_format="%.4g")
    draw(ranked, HERE / "figure.png")
    made, page = part(runs, ranked), PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}")
    print(made)


if __name__ == "__main__":
    main()
