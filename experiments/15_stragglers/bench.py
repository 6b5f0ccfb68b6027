"""Long-tailed generators in real time: does the staleness bound hold, and does the learner stay fed?"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from asyncrlhf.bench.measure import QUIET, show, spread, tell, write
from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import read_metrics

SETTING = [
    *QUIET,
    "generator=fake",
    "generator.replicas=4",
    "generator.slots=16",
    "generator.threads=0",
    "generator.fake.latency_sigma=0.5",
    "generator.fake.latency_max_ratio=50",
    "async.max_staleness=2",
    "batch_size=32",
    "num_generations=4",
]


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Four fake generators under Ray, the longest responses 50 times the median. Throughput is told as the share of
    its time that the learner trains: 1 is all that it can take."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench straggler", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--latency", type=float, default=0.05, help="median seconds of a response")
    parser.add_argument("--tail", type=float, default=0.01, help="how often a response takes 50 times the median")
    parser.add_argument("--out", type=Path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    busy: list[float] = []
    facts: list[dict[str, Any]] = []
    for seed in range(options.repeats):
        tell(seed + 1, options.repeats)
        tail = [
            f"generator.fake.tail_probability={options.tail}",
            f"generator.fake.latency_median={options.latency}",
            f"steps={options.steps}",
            f"seed={seed}",
        ]
        with tempfile.TemporaryDirectory() as folder:
            config = load_config([f"run_dir={folder}/run", *SETTING, *tail, *overrides])
            ledger = train(config)["ledger"]
            metrics = read_metrics(Path(folder) / "run" / "metrics.jsonl")
            rows = pq.read_table(Path(folder) / "run" / "rollouts").to_pylist()
        trained = [r for r in rows if r["state"] == "trained"]
        over = sum(r["staleness"] > config.async_.bound for r in trained)
        busy.append(sum(m["train_seconds"] for m in metrics[1:]) / (metrics[-1]["wall_time"] - metrics[0]["wall_time"]))
        facts.append({"over_the_bound": over, "ledger": ledger, "staleness_max": max(r["staleness"] for r in trained)})
        print(f"seed {seed}: {len(trained)} trained, {over} over the bound, ledger {ledger}")
    rows_shown = {"share of its time the learner trains": spread(busy)}
    show(f"{options.steps} steps, 4 generators, longest response 50 times the median", rows_shown, "")
    return write({"busy": rows_shown, "runs": facts, "settings": [*SETTING, *overrides]}, options.out)
