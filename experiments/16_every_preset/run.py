"""Trains the built-in task with every algorithm preset from the command line, one step off-policy, and tabulates it."""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncrlhf
from asyncrlhf.records.write.recorder import read_metrics

HERE = Path(__file__).parent
# All but the one that learns from a teacher and not from rewards.
PRESETS = sorted(
    path.stem for path in (HERE.parents[1] / "conf" / "algorithm").glob("*.yaml") if path.stem != "distill"
)
SETTINGS = [
    "runtime=local", "async=fixed_lag", "async.lag=1", "logging=quiet", "logging.rollouts=false",
    "weights.audit_every=0", "task.heldout_size=256", "checkpoint.every=0",
]  # fmt: skip
FIELDS = ("preset", "seed", "first_reward", "last_reward", "rise_in_standard_errors", "heldout_before", "heldout_after",
          "staleness_max", "ess_fraction")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="*", default=PRESETS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/every_preset"))
    parser.add_argument("--out", type=Path, default=HERE / "result.csv")
    options = parser.parse_args()
    cells = [(preset, seed) for preset in options.presets for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.workers) as pool:
        rows = list(pool.map(lambda cell: train(*cell, options.steps, options.runs), cells))
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    flat = [f"{row['preset']} (seed {row['seed']})" for row in rows if float(row["rise_in_standard_errors"]) <= 2]
    print(f"{len(rows) - len(flat)} of {len(rows)} runs rose by more than two standard errors; the others: {flat}")


def train(preset: str, seed: int, steps: int, runs: Path) -> dict[str, object]:
    """One `asyncrlhf train`; a run that is there already is only read."""
    folder = runs / f"{preset}-{seed}"
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", asyncrlhf.__name__, "train", f"algorithm={preset}", f"seed={seed}"]
        command += [f"steps={steps}", f"run_dir={folder}", *SETTINGS]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    metrics = read_metrics(folder / "metrics.jsonl")
    rewards = [row["reward_mean"] for row in metrics]
    window = max(2, len(rewards) // 10)
    first, last = _moments(rewards[:window]), _moments(rewards[-window:])
    error = ((first[1] + last[1]) / window) ** 0.5
    heldout = summary["heldout_accuracy"]
    values = (
        preset, seed, first[0], last[0], (last[0] - first[0]) / max(error, 1e-9), heldout["before"], heldout["after"],
        max(row["staleness_max"] for row in metrics), metrics[-1]["ess_fraction"],
    )  # fmt: skip
    row = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in zip(FIELDS, values, strict=True)}
    print(*row.values(), flush=True)
    return row


def _moments(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sum((x - mean) ** 2 for x in values) / (len(values) - 1)


if __name__ == "__main__":
    main()
