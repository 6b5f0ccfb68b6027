"""Question B: what asynchrony saves when tools take 0, 0.1, 1 and 5 s: tools.csv. Resumes.

    python -m experiments.34_episode_staleness.tools local   # the virtual clock
    python -m experiments.34_episode_staleness.tools ray     # real time, without the tools of 5 s
    python -m experiments.34_episode_staleness.tools busy    # busy.csv: 256 episodes under Ray, is the learner busy?

Four turns an episode, each of 0.25 s in the median (fake engine) and then the tool; 32 episodes a step of 0.5 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from experiments.study import append

HERE = Path(__file__).absolute().parent
WORLD = "experiments.34_episode_staleness.worlds"
TOOLS = {0.0: "Tool0", 0.1: "Tool01", 1.0: "Tool1", 5.0: "Tool5"}
BATCH, LEARNER_SECONDS = 32, 0.5
# Mode: the bound (0: sync) and the episodes at a time. Sync never plays more than one batch of them, and with 32 at a
# time, which are one batch, a bound over 2 changes nothing.
MODES = ((0, 32), (1, 32), (2, 32), (1, 256), (2, 256), (4, 256))
RAY_MODES = ((0, 32), (1, 256), (2, 256), (4, 256), (2, 32))
SEEDS = (0, 1, 2)
# Of a run; the steps between which its time is measured. Batches come in bursts of the bound + 1.
STEPS = {"local": (24, 5, 20), "ray": (18, 5, 13)}
# 256 episodes at a time, whose tools take ten times the sampling: they make 58 a second, and the learner needs 32.
BUSY = (
    "batch_size=16", "async.max_staleness=24", "buffer.capacity=512", "generator.fake.latency_median=0.1", "steps=120",
)  # fmt: skip
BUSY_FROM, BUSY_TO = 20, 120  # the steps between which its time is measured
KEY = ["runtime", "tool_seconds", "bound", "concurrency", "seed"]
COLUMNS = [*KEY, "step_seconds", "busy", "staleness", "learner_seconds"]


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    runtime: str
    tool_seconds: float
    bound: int
    concurrency: int
    seed: int


def grid(runtime: str) -> Iterator[Cell]:
    """Seed by seed, the modes in turn, in the other order for every second seed."""
    tools, modes = (list(TOOLS), MODES) if runtime == "local" else (list(TOOLS)[:3], RAY_MODES)
    for seed, tool in itertools.product(SEEDS, tools):
        for bound, concurrency in modes[:: -1 if seed % 2 else 1]:
            yield Cell(runtime, tool, bound, concurrency, seed)


def overrides(cell: Cell) -> list[str]:
    mode = [f"async.max_staleness={cell.bound}"] if cell.bound else ["async.mode=sync"]
    step = f"learner.virtual_step_seconds={LEARNER_SECONDS}"
    if cell.runtime == "ray":
        step = f"algorithm.loss.target={WORLD}:slow_loss"
    return [
        f"runtime={cell.runtime}", *mode, step, f"steps={STEPS[cell.runtime][0]}", f"batch_size={BATCH}",
        "num_generations=8", f"seed={cell.seed}", f"episode.environment={WORLD}:{TOOLS[cell.tool_seconds]}",
        f"episode.concurrency={cell.concurrency}", "task=environment", "reward=environment", "generator.engine=fake",
        "generator.slots=256", "generator.fake.latency_median=0.25", "generator.fake.length_mean=4",
        "generator.max_completion_length=100", "fusion.max_wait_ms=0", "logging=quiet", "logging.rollouts=false",
        "checkpoint.at_end=false", "weights.audit_every=0", "eval_every=0", "task.heldout_size=1",
        "learner.token_budget=16384",  # one pass a step, so that slow_loss is called once
    ]  # fmt: skip


def run(cell: Cell) -> dict[str, Any]:
    """The row of one run."""
    _, first, last = STEPS[cell.runtime]
    return measured(cell, overrides(cell), first, last)


def busy(seed: int) -> dict[str, Any]:
    cell = Cell("ray", 1.0, 24, 256, seed)
    given = [word for word in overrides(cell) if word.partition("=")[0] not in {own.partition("=")[0] for own in BUSY}]
    return measured(cell, [*given, *BUSY], BUSY_FROM, BUSY_TO)


def measured(cell: Cell, words: Sequence[str], first: int, last: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tools-") as folder:
        given = [*words, f"run_dir={folder}/run"]
        if cell.runtime == "local":
            train(load_config(given))
        else:  # a Ray of its own
            subprocess.run([sys.executable, "-m", "asyncrlhf", "train", *given], check=True, capture_output=True)
        rows = read_metrics(Path(folder) / "run" / METRICS_FILE)
    counted = rows[first:last]
    seconds = rows[last - 1]["wall_time"] - rows[first - 1]["wall_time"]
    trained = sum(row["train_seconds"] for row in counted)
    staleness = sum(row["staleness_mean"] for row in counted) / len(counted)
    found = [seconds / len(counted), trained / seconds, staleness, trained / len(counted)]
    return dict(zip(COLUMNS, [*astuple(cell), *found], strict=True))


def train_nothing(self: TorchBackend, batch: Any) -> StepResult:
    """On the virtual clock a step's time is given, whatever it computes."""
    self.policy_version += 1
    return StepResult({"loss": 0.0, "grad_norm": 0.0, "ess_fraction_seq": 1.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("local", "ray", "busy"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    TorchBackend.train_step = train_nothing  # type: ignore[method-assign]
    if options.what == "busy":
        rows = [busy(seed) for seed in SEEDS]
        pd.DataFrame(rows, columns=COLUMNS).to_csv(HERE / "busy.csv", index=False, float_format="%.5g")
        return
    path = HERE / "tools.csv"
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(known[KEY].itertuples(index=False, name=None))
    for cell in grid(options.what):
        if astuple(cell) not in done:
            row = run(cell)
            append(path, [row], COLUMNS)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
