"""A plan against its neighbours: it and each layout that differs from it in one setting, run in turn with three seeds.

    asyncrlhf plan --from RUN --out FOLDER/mine
    python experiments/06_planner/neighbours.py FOLDER/mine.json --out RUNS [--steps 150] [overrides]

Writes ``neighbours.csv`` beside itself: seconds a step of each, over the plan's own; none below 0.9 is the claim.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrlhf.planner.layout import Layout, overrides
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.simulate import figures

BOUNDS = [0, 1, 2, 4, 8, 16]


def neighbours(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Each that differs in one setting by one step."""
    yield "plan", layout
    at = BOUNDS.index(layout.max_staleness)
    for bound in BOUNDS[max(0, at - 1) : at] + BOUNDS[at + 1 : at + 2]:
        if layout.publish_every <= bound + 1:
            yield f"max_staleness={bound}", replace(layout, max_staleness=bound)
    for slots in (layout.slots // 2, layout.slots * 2):
        yield f"slots={slots}", replace(layout, slots=slots)
    if 2 * layout.publish_every <= layout.max_staleness + 1:
        yield f"publish_every={2 * layout.publish_every}", replace(layout, publish_every=2 * layout.publish_every)
    if layout.publish_every > 1:
        yield "publish_every=1", replace(layout, publish_every=1)
    other = "flatten" if layout.placement == "auto" else "auto"
    yield f"placement={other}", replace(layout, placement=other)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    given, more = parser.parse_known_args()
    layout = Layout(**json.loads(given.plan.read_text())["layout"])
    quiet = ["logging.report=false", "logging.wandb=disabled", "logging.progress=none", "eval_every=0"]
    found: dict[str, list[float]] = {}
    for seed in (0, 1, 2):  # in turn, so that what else the machine does meets all of them
        for name, other in neighbours(layout):
            folder = given.out / f"{name.replace('=', '-')}-seed-{seed}"
            words = [f"run_dir={folder}", f"seed={seed}", f"steps={given.steps}", *quiet, *overrides(other, gpus=False)]
            done = subprocess.run([sys.executable, "-m", "asyncrlhf", "train", *words, *more], check=False)
            if done.returncode == 0:
                step = figures(read_metrics(folder / "metrics.jsonl"), other.max_staleness)["step_seconds"]
                found.setdefault(name, []).append(step)
                print(name, seed, round(step, 4), os.getloadavg()[0], flush=True)
    own = statistics.median(found["plan"])
    with Path(__file__).with_name("neighbours.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "seeds", "least", "median", "most", "over_plan"])
        for name, steps in found.items():
            middle = statistics.median(steps)
            values = (min(steps), middle, max(steps), middle / own)
            writer.writerow([name, len(steps), *(round(value, 4) for value in values)])


if __name__ == "__main__":
    main()
