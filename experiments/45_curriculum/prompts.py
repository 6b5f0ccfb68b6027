"""Which prompts to sample: six ways, two tasks, five seeds. A CSV row an evaluation; a finished run is not repeated.

python -m experiments.45_curriculum.prompts pilot    # learning rates on another seed: pilot.csv
python -m experiments.45_curriculum.prompts grid     # runs.csv
python -m experiments.45_curriculum.prompts table    # the README's tables and figure.png
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from experiments.resumable import run_missing

HERE = Path(__file__).absolute().parent
FILTER = "buffer.filter_zero_spread=true"
ARMS = {
    "off": (),
    "filter": (FILTER,),
    "difficulty": ("task.curriculum=difficulty",),
    "regret": ("task.curriculum=regret",),
    "difficulty, filter": ("task.curriculum=difficulty", FILTER),
    "regret, filter": ("task.curriculum=regret", FILTER),
}
TASKS = {
    "sums": (),  # the built-in task
    "mixed": ("task.operations=[+,-,*]",),  # which the packaged model knows to very different degrees
}
RATES, PILOT_SEED, SEEDS = (2.5e-5, 5e-5, 1e-4), 100, (0, 1, 2, 3, 4)
STEPS, PILOT_STEPS, EVERY = 160, 80, 4
BASE = (
    "runtime=local", "async.max_staleness=2", "batch_size=64", "num_generations=8",
    f"eval_every={EVERY}", "evaluation.temperature=1", "task.heldout_size=256", "evaluation.num_generations=2",
    "generator.slots=128", "logging=quiet", "logging.rollouts=false", "weights.audit_every=0",
    "checkpoint.at_end=false",
)  # fmt: skip
COLUMNS = ["step", "sampled", "dropped", "heldout", "reward_mean", "zero_spread_groups", "staleness_mean"]
ALIKE = (7000, 10300)  # answers sampled: the mean of the evaluations there
LEVELS = 0.5  # of the way from the start to the end of `off`, in the mean of its seeds: the quality asked for


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    task: str
    arm: str
    learning_rate: float
    seed: int


def pilot() -> Iterator[Cell]:
    for task, rate, arm in itertools.product(TASKS, RATES, ARMS):
        yield Cell(task, arm, rate, PILOT_SEED)


def grid() -> Iterator[Cell]:
    """Each arm at the rate with most held-out reward over the whole pilot run."""
    tried = pd.read_csv(HERE / "pilot.csv")
    mean = tried.groupby(["task", "arm", "learning_rate"]).heldout.mean()
    best = {key: float(mean[key].idxmax()) for key in mean.index.droplevel("learning_rate").unique()}
    for seed, task, arm in itertools.product(SEEDS, TASKS, ARMS):
        yield Cell(task, arm, best[task, arm], seed)


def steps_of(cell: Cell) -> int:
    return PILOT_STEPS if cell.seed == PILOT_SEED else STEPS


def overrides(cell: Cell) -> list[str]:
    own = [f"steps={steps_of(cell)}", f"learner.learning_rate={cell.learning_rate}", f"seed={cell.seed}"]
    return [*BASE, *TASKS[cell.task], *ARMS[cell.arm], *own]


def run(cell: Cell) -> list[dict[str, Any]]:
    """One row for each evaluation: the one before the first step has step 0, that after the last one the run's."""
    steps = steps_of(cell)
    with tempfile.TemporaryDirectory(prefix="curriculum-") as folder:
        summary = train(load_config([*overrides(cell), f"run_dir={folder}/run"]))
        found = read_metrics(Path(folder) / "run" / METRICS_FILE)
    ends = summary["heldout_accuracy"]
    rows: list[dict[str, Any]] = [{"step": 0, "sampled": 0, "dropped": 0, "heldout": ends["before"]}]
    for i in range(EVERY, steps + 1, EVERY):
        last = found[i - 1]
        row = {"step": i, "dropped": last["dropped"], "sampled": 64 * i + last["dropped"]}
        row["heldout"] = ends["after"] if i == steps else last["heldout_accuracy"]
        for name in ("reward_mean", "zero_spread_groups", "staleness_mean"):
            row[name] = float(np.mean([step[name] for step in found[i - EVERY : i]]))
        rows.append(row)
    return rows


def samples_to(rows: pd.DataFrame, quality: float) -> float:
    """Answers sampled until the mean of two neighbouring evaluations reaches ``quality``, by a line between such means;
    NaN if it never does."""
    smooth = rows.sort_values("step")[["sampled", "heldout"]].rolling(2).mean().dropna().to_numpy()
    for (before, low), (after, high) in itertools.pairwise(smooth):
        if high >= quality > low:
            return float(before + (after - before) * (quality - low) / (high - low))
    return float("nan") if smooth[0, 1] < quality else float(smooth[0, 0])


def table() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = pd.read_csv(HERE / "runs.csv")
    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(11, 4), squeeze=False)
    for task, axis in zip(TASKS, axes[0], strict=True):
        own = runs[runs.task == task]
        plain = own[own.arm == "off"]
        start, end = (plain[plain.step == step].heldout.mean() for step in (0, STEPS))
        quality = start + LEVELS * (end - start)
        print(f"\n{task}: from {start:.3f}, quality {quality:.3f}")
        print(
            "| prompts | rate | samples to it | of `off`'s | equal samples | less `off` | equal steps | less `off` |",
            end="",
        )
        print(" dropped | no spread | staleness |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        late = own[own.sampled.between(*ALIKE)]
        late_off = late[late.arm == "off"].groupby("seed").heldout.mean()
        end_off = plain[plain.step == STEPS].set_index("seed").heldout
        taken = own.groupby(["arm", "seed"])[["step", "sampled", "heldout"]].apply(samples_to, quality=quality)
        for arm in ARMS:
            rows, mine = own[own.arm == arm], taken[arm]
            alike = late[late.arm == arm].groupby("seed").heldout.mean()
            last = rows[rows.step == STEPS].set_index("seed")
            share = last.dropped / last.sampled
            figures = (
                (mine, 0), (mine / taken["off"], 2), (alike, 3), (alike - late_off, 3), (last.heldout, 3),
                (last.heldout - end_off, 3), (share, 3),
            )  # fmt: skip
            cells = [f"{x.mean():.{d}f} ± {x.std(ddof=1) / len(x) ** 0.5:.{d}f}" for x, d in figures]
            never = f" ({int(mine.isna().sum())} never)" if mine.isna().any() else ""
            print(
                f"| {arm} | {rows.learning_rate.iloc[0]:g} | {cells[0]}{never} | {' | '.join(cells[1:])} | "
                f"{rows.zero_spread_groups.mean():.2f} | {rows.staleness_mean.mean():.2f} |"
            )
            mean = rows.groupby("step")[["sampled", "heldout"]].mean()
            axis.plot(mean["sampled"], mean["heldout"], label=arm)
        axis.axhline(quality, color="0.7", lw=0.8)
        axis.set(title=task, xlabel="answers sampled, dropped ones included", ylabel="held-out reward")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(HERE / "figure.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pilot", "grid", "table"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.action == "table":
        return table()
    cells, name = (pilot(), "pilot.csv") if options.action == "pilot" else (grid(), "runs.csv")
    run_missing(cells, run, HERE / name, COLUMNS, ("sampled", "heldout"), options.workers)


if __name__ == "__main__":
    main()
