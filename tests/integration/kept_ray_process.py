"""Run by test_kept_ray in a process of its own: a sweep's worker, with jobs that have the machine alone.

Writes what it saw after each job to FOLDER/seen.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrlhf.cluster import own_ray
from asyncrlhf.sweeps import worker

SETTINGS = (
    "generator.engine=fake", "steps=2", "batch_size=8", "num_generations=4", "generator.slots=8",
    "task.heldout_size=4", "logging.wandb=disabled", "generator.max_completion_length=6",
)  # fmt: skip
JOBS = {"first": [], "second": [], "local": ["runtime=local"], "broken": ["generator.fake.failure_probability=1"]}


def below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def titles() -> list[str]:
    found = []
    for process in below():
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline())[:90])
    return found


def main(folder: Path) -> None:
    seen = []
    for name, more in JOBS.items():
        order = worker.Order((*SETTINGS, *more, f"run_dir={folder}/{name}"), None, f"{folder}/{name}.log", "", 1)
        answer = worker.one_job(order)
        ray = own_ray._Kept.ray
        seen.append(
            {
                "job": name,
                "state": answer.state,
                "address": ray.address if ray is not None else "",
                "actors": [title for title in titles() if "Actor" in title],
                "cores": sorted({len(process.cpu_affinity()) for process in below()}),
            }
        )
    worker._stop_kept_ray()
    (folder / "seen.json").write_text(json.dumps([seen, titles()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
