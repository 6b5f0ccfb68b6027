"""Predictions across settings: costs from one run of the default config, others predicted before they are run.

    python experiments/06_planner/across.py --out FOLDER [--steps 200] [--rounds 3] [--local]

Each round runs the source and all settings in turn, with another seed; its predictions are from its own source, and
made before its other runs, because the speed of a shared machine changes within minutes. ``--local``: on the local
runtime, whose virtual clock no other work on the machine disturbs (8 ms an iteration, 15 ms a step). Prints and writes
``across.csv``, or ``across_local.csv``, beside itself: seconds a step, the learner's idle share and staleness,
predicted and measured (medians of the rounds; for the step the least and most, and the rounds' errors), and the
machine's load. Runs that exist are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from asyncrlhf.actors.where import available_cores
from asyncrlhf.planner.fit import hiccups_of_run
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.cost_world import Conditions
from asyncrlhf.simulator.given import changed, fitted_costs, settings_of_run, sharing, workload_of
from asyncrlhf.simulator.simulate import config_of_run, figures, simulate

SOURCE = ("async.max_staleness=2",)
OTHERS = {
    "sync": ("async.mode=sync", "async.max_staleness=null"),
    "lag 0": ("async.max_staleness=0",),
    "lag 1": ("async.max_staleness=1",),
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


def predict(source: Path) -> dict[str, dict[str, float]]:
    """Figures of each setting, simulated with the costs of the run ``source``."""
    costs, _ = fitted_costs(source)
    stops = hiccups_of_run(source)
    found = {}
    for name, overrides in {"source": (), **OTHERS}.items():
        config = config_of_run(source, overrides)
        shared = sharing(changed(settings_of_run(source, overrides)), costs, len(available_cores()))
        conditions = Conditions(hiccups=stops[0], hiccup_seconds=stops[1], **shared)
        with tempfile.TemporaryDirectory() as folder:
            simulate(config, costs, workload_of(source), Path(folder) / "run", conditions)
            found[name] = figures(read_metrics(Path(folder) / "run" / "metrics.jsonl"), config.async_.bound)
    return found


def row_of(name: str, predicted: list[dict[str, float]], runs: list[dict[str, float]]) -> dict[str, Any]:
    """``predicted`` and ``runs``: one of each round."""
    row: dict[str, Any] = {"setting": name, "runs": len(runs), "load": round(max(run["load"] for run in runs), 1)}
    for figure in FIGURES:
        row |= {f"predicted_{figure}": round(median(p[figure] for p in predicted), 4)}
        row |= {f"measured_{figure}": round(median(run[figure] for run in runs), 4)}
    steps = [run["step_seconds"] for run in runs]
    row |= {"least_step_seconds": round(min(steps), 4), "most_step_seconds": round(max(steps), 4)}
    errors = sorted(p["step_seconds"] / own - 1 for p, own in zip(predicted, steps, strict=True))
    told = {"least_step_error": errors[0], "step_error": median(errors), "most_step_error": errors[-1]}
    return row | {key: round(error, 3) for key, error in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--local", action="store_true")
    given = parser.parse_args()
    predicted: list[dict[str, dict[str, float]]] = []  # of each round, by setting
    measured: dict[str, list[dict[str, float]]] = {}
    target = Path(__file__).with_name("across_local.csv" if given.local else "across.csv")
    for seed in range(given.rounds):
        common = (f"steps={given.steps}", f"seed={seed}", *(LOCAL if given.local else ()))
        for name, overrides in {"source": SOURCE, **OTHERS}.items():
            folder, busy = given.out / f"{name} {seed}", os.getloadavg()[0]
            if not (folder / "summary.json").exists() and not train(folder, *common, *overrides):
                sys.exit(f"The run {folder} failed.")
            if name == "source":  # before the round's other runs
                predicted.append(predict(folder))
            bound = config_of_run(folder, ()).async_.bound
            found = figures(read_metrics(folder / "metrics.jsonl"), bound)
            measured.setdefault(name, []).append(found | {"load": max(busy, os.getloadavg()[0])})
            print(name, seed, f"{found['step_seconds']:.4f}", flush=True)
    rows = [row_of(name, [found[name] for found in predicted], runs) for name, runs in measured.items()]
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print("setting | seconds per step: predicted, measured (least to most) | error | learner idle | staleness")
    for row in rows:
        steps = "{predicted_step_seconds}, {measured_step_seconds} ({least_step_seconds} to {most_step_seconds})"
        idle = "{predicted_learner_idle:.2f}, {measured_learner_idle:.2f} | {predicted_staleness:.2f}, "
        errors = "{step_error:+.1%} ({least_step_error:+.1%} to {most_step_error:+.1%})"
        print(("{setting} | " + steps + " | " + errors + " | " + idle + "{measured_staleness:.2f}").format(**row))


if __name__ == "__main__":
    main()
