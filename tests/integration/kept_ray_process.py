"""Run by test_kept_ray in a process of its own: a sweep's worker, with jobs that have the machine alone.

Writes what it saw after each job to FOLDER/seen.json.
"""

from __future__ import annotations

import json
import sys
import time
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
SECONDS = 30.0  # for processes that were told to end


def below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def titles(with_word: str) -> list[str]:
    """Of the processes below, those with the word that have not ended within ``SECONDS``."""
    deadline = time.monotonic() + SECONDS
    while True:
        found = []
        for process in below():
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())[:90]
                found += [title] if title and with_word in title else []  # one that has ended has no title
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def cores() -> set[int]:
    """How many cores the processes below may use."""
    found = set()
    for process in below():
        with suppress(psutil.NoSuchProcess):
            found.add(len(process.cpu_affinity()))
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
                "actors": titles("Actor"),
                "cores": sorted(cores()),
            }
        )
    worker._stop_kept_ray()
    (folder / "seen.json").write_text(json.dumps([seen, titles("")]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
