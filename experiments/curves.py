"""Turns finished runs into what an experiment commits: one small CSV, one plot and a line of figures a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.report.load import group_runs, load_runs
from experiments.figures import write_curves

COLUMNS = [
    "seed", "step", "wall_time", "reward_mean", "staleness_mean", "staleness_max", "ess_fraction", "behavior_kl",
    "mismatch_kl", "entropy", "learner_idle_fraction", "generator_idle_fraction", "samples_per_second",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the experiment's folder")
    parser.add_argument("--window", type=int, default=5, help="steps at both ends that are compared")
    options = parser.parse_args()
    frames = []
    for run in options.runs:
        summary = json.loads((run / "summary.json").read_text())
        frame = pd.DataFrame(read_metrics(run / "metrics.jsonl")).assign(seed=summary["seed"])
        frames.append(frame[COLUMNS])
        print(line(frame.reward_mean, summary, options.window))
    pd.concat(frames).to_csv(options.out / "curves.csv", index=False, float_format="%.5g")
    write_curves(group_runs(load_runs(options.runs)), options.out / "curves.png")


def line(rewards: pd.Series, summary: dict, window: int) -> str:
    first, last = rewards[:window], rewards[-window:]
    error = (first.var() / window + last.var() / window) ** 0.5
    heldout = summary["heldout_accuracy"]
    return (
        f"seed {summary['seed']}: first {window} rewards {first.mean():.3f}, last {last.mean():.3f}, "
        f"difference {(last.mean() - first.mean()) / error:.1f} standard errors; held-out {heldout['before']:.3f} to "
        f"{heldout['after']:.3f}; {summary['wall_seconds']:.0f} s; ledger {summary['ledger']}"
    )


if __name__ == "__main__":
    main()
