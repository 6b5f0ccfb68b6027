"""The sweep `time_to_quality` as this folder keeps it: rows of jobs, curves, the README's table, and the figure.

python experiments/43_time_to_quality/table.py runs/sweeps/time_to_quality-HASH   # reads the sweep first
python experiments/43_time_to_quality/table.py                                    # from the two CSV files here
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.sweeps.record import JOBS_FOLDER
from asyncrlhf.sweeps.results import Estimate

HERE = Path(__file__).resolve().parent
JOBS, CURVES = HERE / "jobs.csv", HERE / "curves.csv"
GOAL = 0.6  # held-out accuracy; 0.285 before training
WINDOW = 3  # evaluations in a row whose mean counts: a single one of 512 answers has an error of 0.02
ARMS = {
    "sync": "sync",
    "sync_both_cores": "sync, both cores for each side in turn",
    **{f"bounds,max_staleness={lag}": f"bound {lag}" for lag in (1, 2, 3, 4)},
}
BASE = "sync"


def read(sweep: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row a job and one a point of its held-out curve, of a finished sweep."""
    jobs, curves = [], []
    for folder in sorted((sweep / JOBS_FOLDER).iterdir()):
        arm, _, seed = folder.name.partition(".")[0].rpartition(",seed=")
        frame = pd.DataFrame(read_metrics(folder / METRICS_FILE))
        own = {"arm": arm, "seed": int(seed)}
        points = frame.loc[frame.heldout_accuracy.notna(), ["step", "wall_time", "heldout_accuracy"]]
        curves.append(points.assign(**own))
        seconds, summary = frame.wall_time.iloc[-1], json.loads((folder / "summary.json").read_text())
        tokens = (frame.tokens_per_second * frame.wall_time.diff().fillna(frame.wall_time.iloc[0])).sum()
        row = {
            "heldout_accuracy": summary["heldout_accuracy"]["after"],
            "staleness": summary["staleness"]["mean"],
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "snapshot_ms": 1000 * frame.snapshot_seconds.median(),
            "publish_ms": 1000 * frame.weight_sync_seconds.median(),
            "learner_idle": frame.learner_idle_fraction.mean(),
            "generator_idle": frame.generator_idle_fraction.mean(),
        }
        jobs.append(own | row)
    return pd.DataFrame(jobs), pd.concat(curves)[["arm", "seed", "step", "wall_time", "heldout_accuracy"]]


def reached(curve: pd.DataFrame, goal: float = GOAL) -> tuple[float, float]:
    """Seconds and updates at which the mean of the last evaluations is first at the goal; infinity if never."""
    smooth = curve.heldout_accuracy.rolling(WINDOW).mean().to_numpy()
    at = np.flatnonzero(smooth >= goal)
    if not len(at):
        return float("inf"), float("inf")
    return float(curve.wall_time.iloc[at[0]]), float(curve.step.iloc[at[0]])


def with_goals(jobs: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """The jobs with ``to_goal`` (seconds) and ``updates`` (to it)."""
    found = {key: reached(own.sort_values("step")) for key, own in curves.groupby(["arm", "seed"])}
    goals = [found[arm, seed] for arm, seed in zip(jobs.arm, jobs.seed, strict=True)]
    return jobs.assign(to_goal=[g[0] for g in goals], updates=[g[1] for g in goals])


def ratio(jobs: pd.DataFrame, arm: str, column: str, base: str = BASE) -> Estimate:
    """An arm's mean over the base's, by the seeds of both."""
    by = {name: own.set_index("seed")[column] for name, own in jobs.groupby("arm")}
    return Estimate.of_ratio([(by[base][seed], by[arm][seed]) for seed in sorted(by[base].index)])


def table(jobs: pd.DataFrame) -> str:
    names = ["staleness", f"held-out {GOAL:g}: updates", "seconds", "of sync's", "all 200 updates, s", "of sync's"]
    names += ["accuracy at the end", "tokens/s", "snapshot, publish, ms"]
    lines = ["| run | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for arm, label in ARMS.items():
        own = jobs[jobs.arm == arm]

        def told(column: str, digits: int, own: pd.DataFrame = own) -> str:
            missed = int(np.isinf(own[column]).sum())
            return f"{missed} of {len(own)} never" if missed else Estimate.of(list(own[column])).text(digits=digits)

        def of_base(column: str, arm: str = arm) -> str:
            return "1" if arm == BASE else ratio(jobs, arm, column).text(digits=2)

        cells = [told("staleness", 2), told("updates", 0), told("to_goal", 1), of_base("to_goal"), told("seconds", 1)]
        cells += [of_base("seconds"), told("heldout_accuracy", 3), told("tokens_per_second", 0)]
        cells.append(f"{own.snapshot_ms.median():.1f}, {own.publish_ms.median():.1f}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_curve(curves: pd.DataFrame, arm: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the seeds of seconds and of smoothed accuracy at each evaluated update, and the latter's error."""
    own = curves[curves.arm == arm]
    accuracy = own.pivot(index="step", columns="seed", values="heldout_accuracy").rolling(WINDOW).mean().dropna()
    seconds = own.pivot(index="step", columns="seed", values="wall_time").loc[accuracy.index]
    error = accuracy.std(axis=1, ddof=1) / accuracy.shape[1] ** 0.5
    return seconds.mean(axis=1).to_numpy(), accuracy.mean(axis=1).to_numpy(), error.to_numpy()


def draw(jobs: pd.DataFrame, curves: pd.DataFrame, target: Path) -> None:
    """Accuracy over seconds, and the seconds to the goal, an arm a colour."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(3, 2))
    colors = ["#555555", "#000000", *plt.get_cmap("viridis")(np.linspace(0.15, 0.85, 4))]
    for (arm, label), color in zip(ARMS.items(), colors, strict=True):
        x, y, error = mean_curve(curves, arm)
        short = label.partition(", ")[0] + (", both cores" if "both" in label else "")
        left.plot(x, y, color=color, label=short, linestyle="--" if arm == "sync" else "-")
        left.fill_between(x, y - error, y + error, color=color, alpha=0.2, linewidth=0)
    left.axhline(GOAL, color="grey", linestyle=":")
    left.set(xlabel="seconds of training", ylabel="held-out accuracy", title="Quality against wall-clock")
    left.legend(loc="lower right", fontsize=8)
    seconds = [Estimate.of(list(jobs[jobs.arm == arm].to_goal)) for arm in ARMS]
    names = ["sync", "sync,\nboth\ncores", "1", "2", "3", "4"]
    right.bar(names, [s.mean for s in seconds], yerr=[s.error for s in seconds], color=colors, capsize=3)
    right.set(ylabel="seconds", title=f"Seconds to {GOAL:g}, by bound of staleness")
    figure.savefig(target, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="?")
    options = parser.parse_args(arguments)
    if options.sweep is not None:
        jobs, curves = read(options.sweep)
        jobs.to_csv(JOBS, index=False, float_format="%.5g")
        curves.to_csv(CURVES, index=False, float_format="%.5g")
    jobs, curves = pd.read_csv(JOBS), pd.read_csv(CURVES)
    jobs = with_goals(jobs, curves)
    print(table(jobs))
    draw(jobs, curves, HERE / "time_to_quality.png")


if __name__ == "__main__":
    main()
