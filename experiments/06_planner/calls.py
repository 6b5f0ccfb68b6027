"""The controller's CPU time per step, fitted to its calls and to the rollouts of the step, over several runs.

    python experiments/06_planner/calls.py RUN [RUN ...] [--warm-up 20]

Prints the CPU milliseconds per call and per rollout, and for each run those of a step, fitted and measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from asyncrlhf.planner.tables import fit
from asyncrlhf.records.write.recorder import read_metrics

NAMES = ("remote_calls", "sequences", "controller_cpu_seconds")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--warm-up", type=int, default=20)
    given = parser.parse_args()
    means = []
    for run in given.runs:
        rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > given.warm_up]
        means.append([float(np.mean([row[name] for row in rows])) for name in NAMES])
    call, rollout = fit([row[:2] for row in means], [row[2] for row in means])
    print(f"{1e3 * call:.2f} ms per call, {1e3 * rollout:.3f} ms per rollout")
    for run, (calls, rollouts, seconds) in zip(given.runs, means, strict=True):
        print(f"{run.name}: {1e3 * (call * calls + rollout * rollouts):.1f} ms fitted, {1e3 * seconds:.1f} measured")


if __name__ == "__main__":
    main()
