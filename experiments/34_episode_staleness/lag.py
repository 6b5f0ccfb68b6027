"""Question A: what exact lags cost episodes of 1, 2, 4 and 8 turns, under three corrections. One CSV row a run.

python -m experiments.34_episode_staleness.lag pilot --model FOLDER   # learning rates at lag 0: pilot.csv
python -m experiments.34_episode_staleness.lag grid --model FOLDER    # lag.csv and lag_curves.csv; resumes
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from experiments.study import append

HERE = Path(__file__).absolute().parent
WORLDS = {1: "One", 2: "Two", 4: "Four", 8: "Eight"}
ROOM = {1: 12, 2: 48, 4: 110, 8: 216}  # tokens of an episode, its questions and results included
CORRECTIONS = {
    "none": ("algorithm=grpo", "algorithm.aggregate=token"),
    "decoupled": ("algorithm=decoupled_grpo",),
    "tis": ("algorithm=tis",),
}
SEEDS, PILOT_SEED = (0, 1, 2), 100
STEPS, LAST = 24, 8  # the largest lag
RATES = dict.fromkeys(WORLDS, 5e-4)  # for each number of turns the pilot's better one
PILOT_RATES = (1e-3, 5e-4)
KEY = ["turns", "lag", "correction", "learning_rate", "seed"]
METRICS = ["ess_fraction", "ess_fraction_seq", "behavior_kl", "entropy", "turns_mean"]
COLUMNS = [*KEY, "before", "after", "area", *METRICS, "seconds"]
BASE = (
    "runtime=local", "task=environment", "reward=environment", "logging=quiet", "logging.rollouts=false",
    "weights.audit_every=0", "checkpoint.at_end=false", "eval_every=0", "evaluation.temperature=1", "async=fixed_lag",
    f"steps={STEPS}", "batch_size=32", "num_generations=8", "generator.slots=64", "episode.max_turn_tokens=12",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    turns: int
    lag: int
    correction: str
    learning_rate: float
    seed: int


def overrides(cell: Cell) -> list[str]:
    return [
        *BASE,
        *CORRECTIONS[cell.correction],
        f"episode.environment=experiments.34_episode_staleness.worlds:{WORLDS[cell.turns]}",
        f"episode.max_turns={cell.turns}",
        f"generator.max_completion_length={ROOM[cell.turns]}",
        f"task.heldout_size={256 // cell.turns}",
        f"async.lag={cell.lag}",
        f"learner.learning_rate={cell.learning_rate}",
        f"seed={cell.seed}",
    ]


def grid() -> Iterator[Cell]:
    """Seed by seed; lag 2 after the others and lag 1 last, so that an interrupted grid lacks them first. At lag 0 there
    is nothing to correct: one run a seed."""
    for lags in ((0, 8, 4), (2,), (1,)):
        for seed, lag, turns in itertools.product(SEEDS, lags, WORLDS):
            for correction in CORRECTIONS if lag else ("decoupled",):
                yield Cell(turns, lag, correction, RATES[turns], seed)


def pilot() -> Iterator[Cell]:
    for rate, turns in itertools.product(PILOT_RATES, WORLDS):
        yield Cell(turns, 0, "decoupled", rate, PILOT_SEED)


def run(cell: Cell, model: str) -> tuple[dict[str, Any], list[float]]:
    """The row of one run, and its rewards by step."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lag-") as folder:
        config = load_config([*overrides(cell), f"model.path={model}", f"run_dir={folder}/run"])
        summary = train(config)
        frame = pd.DataFrame(read_metrics(Path(folder) / "run" / METRICS_FILE))
    if summary["exit_reason"] != "done":
        raise KeyboardInterrupt
    heldout = summary["heldout_accuracy"]
    row = dict(zip(KEY, astuple(cell), strict=True)) | {"before": heldout["before"], "after": heldout["after"]}
    rewards = frame.reward_mean.tolist()
    row |= {"area": area(rewards, cell.lag), "seconds": time.monotonic() - started}
    return row | {name: float(frame[name].mean()) for name in METRICS}, rewards


def area(rewards: Sequence[float], lag: int) -> float:
    """Mean reward of the versions 0 to STEPS - LAST - 1, which every lag has sampled. The batch of step t was sampled
    by version t - lag: by step, a stale run would look worse than its policies are."""
    own = rewards[lag : lag + STEPS - LAST]
    return sum(own) / len(own)


def run_all(cells: Sequence[Cell], model: str, path: Path, curves: Path) -> None:
    """Run the cells that ``path`` lacks, one after the other, and append each as it ends."""
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(known[KEY].itertuples(index=False, name=None))
    left = [cell for cell in cells if astuple(cell) not in done]
    for number, cell in enumerate(left, start=1):
        row, rewards = run(cell, model)
        steps = [{**row, "step": step, "reward_mean": reward} for step, reward in enumerate(rewards)]
        append(curves, steps, [*KEY, "step", "reward_mean"])
        append(path, [row], COLUMNS)
        shown = " ".join(f"{row[name]:.3f}" for name in ("before", "after", "area", "ess_fraction_seq", "seconds"))
        print(f"{number}/{len(left)}", *astuple(cell), shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pilot", "grid"))
    parser.add_argument("--model", required=True, help="the folder of make_checkpoint.py")
    parser.add_argument("--turns", type=int, nargs="+", help="only these")
    parser.add_argument("--rates", type=float, nargs="+", help="the pilot: only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = list(grid() if options.action == "grid" else pilot())
    cells = [cell for cell in cells if cell.turns in (options.turns or WORLDS)]
    cells = [cell for cell in cells if not options.rates or cell.learning_rate in options.rates]
    prefix = "lag" if options.action == "grid" else "pilot"
    run_all(cells, options.model, HERE / f"{prefix}.csv", HERE / f"{prefix}_curves.csv")


if __name__ == "__main__":
    main()
