"""Part C: SmolLM2-135M plays a game in words, at lag 0 and 4, under three corrections. One CSV row a run.

python -m experiments.34_episode_staleness.smollm2 pilot    # does it learn at all, at lag 0: smollm2_pilot.csv
python -m experiments.34_episode_staleness.smollm2 grid     # smollm2.csv; resumes
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.episodes.environment import Environment, Step
from asyncrlhf.episodes.replies import ParsedReply
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from experiments.resumable import run_missing

HERE = Path(__file__).absolute().parent
CORRECTIONS = import_module("experiments.34_episode_staleness.lag").CORRECTIONS
LAG, SEEDS, PILOT_SEED = 4, (0, 1, 2), 100
RATE = 2e-5  # experiment 11's
STEPS = 28
METRICS = ["ess_fraction", "ess_fraction_seq", "behavior_kl", "entropy", "turns_mean", "observed_fraction"]
COLUMNS = ["before", "after", "area", *METRICS, "seconds", "rewards"]
BASE = (
    "runtime=local", "model=smollm2", "task=environment", "reward=environment", "task.heldout_size=64",
    "episode.environment=experiments.34_episode_staleness.smollm2:Twenty", "episode.max_turns=3",
    "episode.max_turn_tokens=6", "generator.max_completion_length=100", "generator.slots=64", "batch_size=32",
    "num_generations=8", f"steps={STEPS}", "async=fixed_lag", "logging=quiet", "logging.rollouts=false",
    "weights.audit_every=0", "checkpoint.at_end=false", "eval_every=0", "evaluation.temperature=1",
    "learner.mixed_precision=auto", "learner.token_budget=2048", "stall_timeout_seconds=1200",
)  # fmt: skip


class Twenty(Environment):
    """Find a number from 1 to 20 in three guesses, told higher or lower. The reward is the share of the numbers that
    the guesses ruled out, and 1 if one was right; saying the middle each time is right in 7 games of 20."""

    GUESSES = 3

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._hidden = int(row["seed"]) * 7 % 20 + 1  # the same for the siblings of a group
        self._low, self._high, self._left = 1, 20, self.GUESSES
        return "Guess my number from 1 to 20. Reply with one number."

    async def step(self, reply: ParsedReply) -> Step:
        said = re.search(r"\d+", reply.text)
        guess, before = int(said[0]) if said else -1, self._high - self._low + 1
        self._left -= 1
        if guess == self._hidden:
            return Step(done=True, reward=before / 20)
        if self._low <= guess < self._hidden:
            self._low = guess + 1
        elif self._hidden < guess <= self._high:
            self._high = guess - 1
        ruled_out = before - (self._high - self._low + 1)
        word = "higher" if self._hidden >= self._low > guess else "lower"
        told = f"It is {word}, from {self._low} to {self._high}."
        return Step(told, done=self._left == 0, reward=ruled_out / 20)


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    lag: int
    correction: str
    learning_rate: float
    seed: int


def grid() -> Iterator[Cell]:
    """Seed by seed, `tis` after the others. At lag 0 there is nothing to correct: one run a seed."""
    for arms in (((0, "decoupled"), (LAG, "none"), (LAG, "decoupled")), ((LAG, "tis"),)):
        for seed, (lag, correction) in itertools.product(SEEDS, arms):
            yield Cell(lag, correction, RATE, seed)


def pilot() -> Iterator[Cell]:
    yield Cell(0, "decoupled", RATE, PILOT_SEED)


def overrides(cell: Cell) -> list[str]:
    own = [f"async.lag={cell.lag}", f"learner.learning_rate={cell.learning_rate}", f"seed={cell.seed}"]
    return [*BASE, *CORRECTIONS[cell.correction], *own]


def run(cell: Cell) -> list[dict[str, Any]]:
    """The one row of a run."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        summary = train(load_config([*overrides(cell), f"run_dir={folder}/run"]))
        frame = pd.DataFrame(read_metrics(Path(folder) / "run" / METRICS_FILE))
    if summary["exit_reason"] != "done":
        raise KeyboardInterrupt
    rewards = frame.reward_mean.tolist()
    sampled = rewards[cell.lag : cell.lag + STEPS - LAG]  # of the versions that both lags have sampled from
    row = {name: float(frame[name].mean()) for name in METRICS}
    row |= {name: summary["heldout_accuracy"][name] for name in ("before", "after")}
    row |= {"area": sum(sampled) / len(sampled), "seconds": time.monotonic() - started}
    return [row | {"rewards": " ".join(f"{reward:.3f}" for reward in rewards)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pilot", "grid"))
    action = parser.parse_args().action
    torch.set_num_threads(2)
    cells, name = (pilot(), "smollm2_pilot.csv") if action == "pilot" else (grid(), "smollm2.csv")
    run_missing(cells, run, HERE / name, COLUMNS, ("before", "after", "area", "ess_fraction_seq", "seconds"))


if __name__ == "__main__":
    main()
