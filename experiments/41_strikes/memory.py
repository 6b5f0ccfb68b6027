"""Every kind of part is ended by the kernel for want of memory, under Ray: is it named, and does the run go on?

    python experiments/41_strikes/memory.py        # about two minutes; root, and memory groups of version 1

One part after the other is put into a memory group that has none, where what it asks for from then on counts. Each
death must be told with the part's name, "Memory was short" and the settings that make it smaller; the run must end
"done" and `asyncrlhf verify` find nothing. One row a part goes to ``memory.jsonl`` beside this file.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from asyncrlhf.records.read.verify import verify
from asyncrlhf.shortages import memory_kills
from tests.chaos.run import commit

strikes = import_module("experiments.41_strikes.strikes")
ROWS = Path(__file__).with_name("memory.jsonl")
TOLD = re.compile(r"(The record writer|[a-z]+-\d+) died\b.*?(Memory was short; .*?\.)(?:\s|$)")
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
APART, STEPS = 6, 150
COMMON = ("learner.learning_rate=0", "batch_size=16", "checkpoint.every=5", "task.heldout_size=2", f"steps={STEPS}")
# A run, and the titles of the actors that are struck in it.
RUNS = {
    "ppo": (("algorithm=ppo", "algorithm.kl=loss", "algorithm.beta=0.05", "reference.workers=1", "critic.workers=1"), (
        "ray::GeneratorActor", "ray::LearnerActor", "ray::RecordActor", *["ray::AnnotatorActor"] * 3,
    )),
    "episodes": (("experiment=tool_arithmetic",), ("ray::EpisodeActor",)),
}  # fmt: skip


def actors(command: Any, title: str) -> list[psutil.Process]:
    found = []
    for process in command.below():
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def examine(name: str) -> list[dict[str, Any]]:
    overrides, titles = RUNS[name]
    place, rows = Path(tempfile.mkdtemp(prefix="m-")), []
    case = strikes.Case(0, "memory", (), (), (*overrides, *COMMON))
    command = strikes.Command(case, place)
    try:
        pool: dict[str, list[psutil.Process]] = {}
        for title in titles:
            at = command.steps()
            strikes.wait(lambda to=at + APART: command.steps() >= to or command.ended(), f"step {at + APART}")
            process = pool.setdefault(title, actors(command, title)).pop(0)
            before, kills, at = text(place), memory_kills(), command.steps()
            with strikes.limited(process, f"{place.name}-{process.pid}", 0):
                strikes.wait(lambda of=process: not of.is_running() or of.status() in GONE, "end by memory")
            strikes.wait(lambda to=at + APART: command.steps() >= to or command.ended(), f"step {at + APART}")
            said = TOLD.findall(" ".join(text(place)[len(before) :].split()))  # without the console's line breaks
            rows.append({"struck": title, "step": at, "by_the_kernel": memory_kills() - kills, "said": said})
        strikes.wait(command.ended, "end")
        summary = json.loads((command.run_dir / "summary.json").read_text())
        whole = {"exit": command.process.returncode, "reason": summary["exit_reason"], "steps": command.steps()}
        whole |= {"verify": verify(command.run_dir), "orphans": strikes.titles(strikes.left(place))}
        return [{"commit": commit(), "run": name, **row, **whole} for row in rows]
    finally:
        strikes.titles(strikes.left(place))
        shutil.rmtree(place, ignore_errors=True)


def text(place: Path) -> str:
    return (place / "output.txt").read_text(errors="replace")


def main() -> None:
    rows = [row for name in RUNS for row in examine(name)]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
