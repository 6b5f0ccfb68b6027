"""Runs predicted from their own records: the default run, experiment 12 (async, sync), 15 (long tails), 18 (one slow).

    python experiments/06_planner/own.py --out FOLDER [--rounds 3] [--only "18"]

Runs of an engine go through ``asyncrlhf simulate --from RUN``, which refuses those of the fake engine: it has no
iterations. Its responses take times of their own, whatever runs beside them, so here the recorded time of a response,
less one message, is its length in ticks, and an iteration takes one tick. How much slower a group of replicas is, its
settings say: such a replica may have finished no rollout. Runs that exist are not repeated. Writes ``own.csv`` beside
itself, or ``own_NAME.csv`` with ``--only NAME``: seconds per step, idle shares, staleness, dropped per trained,
predicted and measured.
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

from asyncrlhf.bench.measure import LOAD, QUIET
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.read.cut_short import flights
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.cost_world import Conditions
from asyncrlhf.simulator.given import changed, settings_of_run
from asyncrlhf.simulator.simulate import config_of_run, figures, settled, simulate

RUNS = {
    "default": ("steps=200",),
    "12 async": (*QUIET, *LOAD, "steps=100"),
    "12 sync": (*QUIET, *LOAD, "steps=100", "async.mode=sync"),
    "15": (
        *QUIET, "generator=fake", "generator.replicas=4", "generator.slots=64", "generator.threads=0",
        "generator.fake.latency_sigma=0.5", "generator.fake.latency_max_ratio=50",
        "generator.fake.tail_probability=0.01", "generator.fake.latency_median=0.03", "async.max_staleness=2",
        "batch_size=128", "num_generations=8", "steps=300",
    ),
    "18": (
        *QUIET, "generator=fake", "async.max_staleness=2", "batch_size=32", "num_generations=4", "steps=80",
        "generator.fake.latency_median=0.25",
        "generator.groups={fast:{replicas:2},slow:{fake:{latency_median:7.5}}}",
    ),
}  # fmt: skip
FIGURES = ("step_seconds", "learner_idle", "generator_idle", "staleness", "dropped_share")
TICKS = 200  # of a median response


def of_records(run: Path, bound: int) -> dict[str, float]:
    return figures(read_metrics(run / "metrics.jsonl"), bound)


def of_timeline(run: Path, bound: int) -> dict[str, float]:
    """As :func:`of_records`, but the generators' idle share by their timelines: a replica tells its seconds with its
    results, which for one that finishes nothing may be dozens of steps later."""
    metrics = read_metrics(run / "metrics.jsonl")
    chosen = settled(metrics, bound)
    since, until = chosen[0]["wall_time"], chosen[-1]["wall_time"]
    spans = pq.read_table(run / "spans", columns=["part", "kind", "start", "end", "busy_seconds"]).to_pandas()
    spans = spans[spans.part.astype(str).str.startswith("generator")]
    decode = spans[spans.kind == "decode"]
    inside = np.minimum(decode.end, until) - np.maximum(decode.start, since)
    busy = decode.busy_seconds * np.maximum(0.0, inside) / np.maximum(1e-9, decode.end - decode.start)
    idle = 1.0 - float(busy.sum()) / (until - since) / spans.part.nunique()
    return figures(metrics, bound) | {"generator_idle": idle}


def simulated(run: Path) -> dict[str, float]:
    """Figures of the run of an engine, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "asyncrlhf", "simulate", "--from", str(run), "--out", f"{folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return of_records(Path(folder) / "run", config_of_run(run, ()).async_.bound)


def simulated_fake(run: Path) -> dict[str, float]:
    """Figures of the run of the fake engine."""
    bound = config_of_run(run, ()).async_.bound
    metrics = read_metrics(run / "metrics.jsonl")
    chosen = settled(metrics, bound)
    own = [b["wall_time"] - a["wall_time"] - b["wait_seconds"] for a, b in pairwise(chosen)]
    table = pq.read_table(run / "rollouts", columns=["generator_id", "admitted_at", "generated_at", "scored_at"])
    rows = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    message = float(np.nanmedian(rows["scored_at"] - rows["generated_at"])) / 3
    kinds = replica_kinds(changed(settings_of_run(run, ())).generator)
    fastest = min(kind.config.fake.latency_median for kind in kinds)
    took: dict[str, list[float]] = defaultdict(list)
    for who, begun, ended in zip(rows["generator_id"], rows["admitted_at"], rows["generated_at"], strict=True):
        if np.isfinite(ended):
            took[who].append(ended - begun - message)
    cut = flights(run).cut  # of the rollouts that were dropped in flight
    slow = {
        kind.replica(number): kind.config.fake.latency_median / fastest
        for kind in kinds
        for number in range(kind.config.replicas)
        if kind.config.fake.latency_median > fastest
    }
    tick = median(seconds for who, own in took.items() if who not in slow for seconds in own) / TICKS

    def ticks(given: Mapping[str, Sequence[float]]) -> list[int]:
        return [max(1, round(t / tick)) for who, own in given.items() if who not in slow for t in own]

    longest = round(TICKS * config_of_run(run, ()).generator.fake.latency_max_ratio)
    lengths = Workload.from_lengths(0.0, ticks(took), ticks(cut), longest)
    published = [row["weight_sync_seconds"] for row in chosen if row.get("weight_sync_seconds")]
    costs = Fitted((tick, 0.0, 0.0), (median(own), 0.0), submit=message, collect=message, transfer=median(published))
    config = config_of_run(run, (f"generator.max_completion_length={lengths.longest}",))
    with tempfile.TemporaryDirectory() as folder:
        simulate(config, costs, lengths, Path(folder) / "run", Conditions(slow=slow))
        return of_timeline(Path(folder) / "run", bound)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=RUNS)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(given.rounds):
        for name, overrides in RUNS.items():
            if given.only not in (None, name):
                continue
            folder = given.out / f"{name} {seed}"
            words = [f"run_dir={folder}", "logging.report=false", "logging.wandb=disabled", f"seed={seed}", *overrides]
            if not (folder / "summary.json").exists():
                subprocess.run([sys.executable, "-m", "asyncrlhf", "train", *words], check=True)
            fake, bound = "generator=fake" in overrides, config_of_run(folder, ()).async_.bound
            measured = (of_timeline if fake else of_records)(folder, bound)
            found = (simulated_fake if fake else simulated)(folder)
            row: dict[str, Any] = {"run": name, "seed": seed}
            for figure in FIGURES:
                row |= {
                    f"predicted_{figure}": round(found[figure], 4),
                    f"measured_{figure}": round(measured[figure], 4),
                }
            rows.append(row)
            print(row, flush=True)
    table = f"own_{given.only}.csv" if given.only else "own.csv"
    with Path(__file__).with_name(table).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
