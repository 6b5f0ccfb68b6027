"""Runs on fake generators, each predicted from its own records: long tails (experiment 15), a slow replica (18).

    python experiments/06_planner/fakes.py --out FOLDER [--rounds 3]

A fake engine has no iterations, so ``asyncrlhf simulate --from RUN`` refuses it. Its responses take times of their own,
whatever runs beside them: here the recorded time of a response is its length in ticks, and an iteration takes one tick.
A replica of another group is as many times slower as its responses' median. Runs that exist are not repeated. Writes
``fakes.csv`` beside itself: seconds per step, idle shares, staleness, dropped per trained, predicted and measured.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from asyncrlhf.cli.simulate import config_of_run
from asyncrlhf.cluster.cost_world import Conditions
from asyncrlhf.orchestrator.simulate import figures, settled, simulate
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.cut_short import flights
from asyncrlhf.records.recorder import read_metrics

QUIET = ("logging=quiet", "eval_every=0", "task.heldout_size=8", "weights.audit_every=0", "generator=fake")
RUNS = {
    "15: long tails": (
        *QUIET, "generator.replicas=4", "generator.slots=64", "generator.threads=0", "generator.fake.latency_sigma=0.5",
        "generator.fake.latency_max_ratio=50", "generator.fake.tail_probability=0.01",
        "generator.fake.latency_median=0.03", "async.max_staleness=2", "batch_size=128", "num_generations=8",
        "steps=300",
    ),
    "18: one of three 30 times slower": (
        *QUIET, "async.max_staleness=2", "batch_size=32", "num_generations=4", "steps=80",
        "generator.fake.latency_median=0.25",
        "generator.groups={fast:{replicas:2},slow:{fake:{latency_median:7.5}}}",
    ),
}  # fmt: skip
FIGURES = ("step_seconds", "learner_idle", "generator_idle", "staleness", "dropped_share")
TICKS = 200  # of a median response


def predict(run: Path) -> dict[str, float]:
    """Figures of the run, simulated from its own records."""
    bound = config_of_run(run, ()).async_.bound
    metrics = read_metrics(run / "metrics.jsonl")
    chosen = settled(metrics, bound)
    own = [b["wall_time"] - a["wall_time"] - b["wait_seconds"] for a, b in pairwise(chosen)]
    table = pq.read_table(run / "rollouts", columns=["generator_id", "admitted_at", "generated_at", "scored_at"])
    rows = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    took: dict[str, list[float]] = defaultdict(list)
    for who, begun, ended in zip(rows["generator_id"], rows["admitted_at"], rows["generated_at"], strict=True):
        if np.isfinite(ended):
            took[who].append(ended - begun)
    cut = flights(run).cut  # of the rollouts that were dropped in flight
    fast = min(map(median, took.values()))
    # A replica that finished none is at least as slow as its longest rollout in flight says.
    usual = {who: max(own) for who, own in cut.items()} | {who: median(own) for who, own in took.items()}
    slow = {who: seconds / fast for who, seconds in usual.items() if seconds > 3 * fast}
    tick = fast / TICKS

    def ticks(given: Mapping[str, Sequence[float]]) -> list[int]:
        return [max(1, round(t / tick)) for who, own in given.items() if who not in slow for t in own]

    longest = round(TICKS * config_of_run(run, ()).generator.fake.latency_max_ratio)
    lengths = Workload.from_lengths(0.0, ticks(took), ticks(cut), longest)
    message = float(np.nanmedian(rows["scored_at"] - rows["generated_at"])) / 3
    published = [row["weight_sync_seconds"] for row in chosen if row.get("weight_sync_seconds")]
    costs = Fitted((tick, 0.0, 0.0), (median(own), 0.0), submit=message, collect=message, transfer=median(published))
    config = config_of_run(run, (f"generator.max_completion_length={lengths.longest}",))
    with tempfile.TemporaryDirectory() as folder:
        simulate(config, costs, lengths, Path(folder) / "run", Conditions(slow=slow))
        return figures(read_metrics(Path(folder) / "run" / "metrics.jsonl"), bound)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(given.rounds):
        for name, overrides in RUNS.items():
            folder = given.out / f"{name[:2]}-{seed}"
            words = [f"run_dir={folder}", f"seed={seed}", *overrides]
            if not (folder / "summary.json").exists():
                subprocess.run([sys.executable, "-m", "asyncrlhf", "train", *words], check=True)
            measured = figures(read_metrics(folder / "metrics.jsonl"), config_of_run(folder, ()).async_.bound)
            found = predict(folder)
            row: dict[str, Any] = {"run": name, "seed": seed}
            for figure in FIGURES:
                row |= {
                    f"predicted_{figure}": round(found[figure], 4),
                    f"measured_{figure}": round(measured[figure], 4),
                }
            rows.append(row)
            print(row, flush=True)
    with Path(__file__).with_name("fakes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
