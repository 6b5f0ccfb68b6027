"""Predictions across settings: costs from one run of the default config, others predicted before they are run.

    python experiments/06_planner/across.py --out FOLDER [--steps 200] [--seed 0] [--local]

``--local``: on the local runtime, whose virtual clock no other work on the machine disturbs (8 ms an iteration, 15 ms
a step). Writes ``across.csv``, or ``across_local.csv``, beside itself: seconds a step, the learner's idle share and
staleness, predicted and measured, and how busy the machine was. The first two rows are the source itself, then another
run of it.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrlhf.cli.simulate import config_of_run
from asyncrlhf.cluster.cost_parts import Conditions
from asyncrlhf.orchestrator.simulate import figures, simulate
from asyncrlhf.planner.fit import costs_of_run, hiccups_of_run, workload_of_run
from asyncrlhf.records.recorder import read_metrics

SOURCE = ("async.max_staleness=2",)
OTHERS = {
    "again": (),
    "sync": ("async.mode=sync", "async.max_staleness=null"),
    "lag 0": ("async.max_staleness=0",),
    "lag 8": ("async.max_staleness=8",),
    "fewer slots": ("async.max_staleness=2", "generator.slots=16"),
    "publish every 2": ("async.max_staleness=2", "weights.publish_every=2"),
    "2 replicas": ("async.max_staleness=2", "generator.replicas=2"),
}
LOCAL = (
    "runtime=local", "generator.virtual_step_seconds=0.008", "learner.virtual_step_seconds=0.015", "batch_size=32",
    "generator.slots=32",
)  # fmt: skip
FIGURES = ("step_seconds", "learner_idle", "staleness", "dropped_share")


def train(folder: Path, *overrides: str) -> bool:
    """One run; on the local runtime in this process, which has imported everything already."""
    words = [f"run_dir={folder}", "logging.report=false", "logging.wandb=disabled", "logging.progress=none"]
    words += ["eval_every=0", "task.heldout_size=8", *overrides]
    if "runtime=local" in words:
        from asyncrlhf.config.compose import load_config
        from asyncrlhf.orchestrator.run import train as run_here

        return run_here(load_config(words))["exit_reason"] == "done"
    return subprocess.run([sys.executable, "-m", "asyncrlhf", "train", *words], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local", action="store_true")
    given = parser.parse_args()
    common = (f"steps={given.steps}", f"seed={given.seed}", *(LOCAL if given.local else ()))
    source = given.out / "source"
    if not source.exists() and not train(source, *common, *SOURCE):
        sys.exit("The source run failed.")
    costs, lengths, stops = costs_of_run(source), workload_of_run(source), hiccups_of_run(source)
    conditions = Conditions(hiccups=stops[0], hiccup_seconds=stops[1])
    predicted: dict[str, dict[str, float]] = {}
    for name, overrides in {"source": (), **OTHERS}.items():  # all of them before any is run
        config = config_of_run(source, overrides)
        folder = given.out / f"simulated {name}"
        simulate(config, costs, lengths, folder, conditions)
        predicted[name] = figures(read_metrics(folder / "metrics.jsonl"), config.async_.bound)
    rows: list[dict[str, Any]] = []
    target = Path(__file__).with_name("across_local.csv" if given.local else "across.csv")
    for name, overrides in {"source": SOURCE, **OTHERS}.items():
        folder = given.out / name
        busy = os.getloadavg()[0]
        if not folder.exists() and not train(folder, *common, *overrides):
            print(f"{name} failed")
            continue
        bound = config_of_run(folder, ()).async_.bound
        measured = figures(read_metrics(folder / "metrics.jsonl"), bound)
        row: dict[str, Any] = {"setting": name, "load": round((busy + os.getloadavg()[0]) / 2, 1)}
        for figure in FIGURES:
            row |= {f"predicted_{figure}": round(predicted[name][figure], 4)}
            row |= {f"measured_{figure}": round(measured[figure], 4)}
        row["step_error"] = round(predicted[name]["step_seconds"] / measured["step_seconds"] - 1, 3)
        rows.append(row)
        print(row, flush=True)
        with target.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
