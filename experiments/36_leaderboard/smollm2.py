"""The best six of the ranking, the default and `grpo` with SmolLM2-135M on reasoning-gym at lags 0 and 4.

python -m experiments.36_leaderboard.smollm2          # smollm2.csv; resumes
python -m experiments.36_leaderboard.smollm2 show     # the README's table
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from experiments.resumable import run_missing

table = import_module("experiments.36_leaderboard.table")
HERE = Path(__file__).absolute().parent
BEST = ("opsm", "impact", "sao", "m2po", "vespo", "vcpo")
METHODS = (table.DEFAULT, *BEST, "grpo")  # grpo corrects nothing
LAGS, SEEDS = (4, 0), (0, 1)
STEPS, RATE, LAST = 32, 2e-5, 8  # experiment 11's rate, for all
METRICS = ["ess_fraction_seq", "behavior_kl", "entropy", "grad_norm"]
COLUMNS = ["before", "reward", "train_reward", *METRICS, "seconds", "rewards"]
BASE = (
    "runtime=local", "experiment=smollm2_reasoning", "async=fixed_lag", f"steps={STEPS}", "batch_size=32",
    "num_generations=8", "algorithm.num_iterations=1", "algorithm.minibatches=2", "task.heldout_size=128",
    "evaluation.temperature=1", "eval_every=0", "logging=quiet", "logging.rollouts=false", "weights.audit_every=0",
    "checkpoint.at_end=false", "learner.lr_schedule=constant", f"learner.learning_rate={RATE}",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    method: str
    lag: int
    seed: int


def grid() -> Iterator[Cell]:
    """Seed by seed, the stale lag first."""
    for seed, lag, method in itertools.product(SEEDS, LAGS, METHODS):
        yield Cell(method, lag, seed)


def overrides(cell: Cell) -> list[str]:
    return [*BASE, f"algorithm={cell.method}", f"async.lag={cell.lag}", f"seed={cell.seed}"]


def run(cell: Cell) -> list[dict[str, Any]]:
    """The one row of a run: held-out reward before and after, one sampled answer a prompt."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        summary = train(load_config([*overrides(cell), f"run_dir={folder}/run"]))
        frame = pd.DataFrame(read_metrics(Path(folder) / "run" / METRICS_FILE))
    if summary["exit_reason"] != "done":
        raise KeyboardInterrupt
    row = {name: float(frame[name].mean()) for name in METRICS if name in frame}
    row |= {"before": summary["heldout_accuracy"]["before"], "reward": summary["heldout_accuracy"]["after"]}
    row |= {"train_reward": frame.reward_mean.iloc[-LAST:].mean(), "seconds": time.monotonic() - started}
    return [row | {"rewards": " ".join(f"{reward:.3f}" for reward in frame.reward_mean)}]


def show(runs: pd.DataFrame) -> str:
    """Markdown: held-out reward at both lags and its difference to the default's of the same seed and lag."""
    lines = ["| preset | seeds | " + " | ".join(f"lag {lag} | against the default" for lag in sorted(LAGS)) + " |"]
    lines += ["|---|---|" + "---|---|" * len(LAGS)]
    rewards = runs.pivot(index=["lag", "seed"], columns="method", values="reward")
    for method in sorted(rewards, key=lambda name: -rewards[name].mean()):
        cells = [f"`{method}`", str(runs[runs.method == method].seed.nunique())]
        for lag in sorted(LAGS):
            own = rewards.loc[lag][method]
            lead = own - rewards.loc[lag][table.DEFAULT]
            cells += [f"{own.mean():.3f} ± {table.error(own):.3f}"]
            cells += ["" if method == table.DEFAULT else f"{lead.mean():+.3f} ± {table.error(lead):.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("grid", "show"), default="grid")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="only these")
    options = parser.parse_args()
    if options.action == "show":
        print(show(pd.read_csv(HERE / "smollm2.csv")))
        return
    torch.set_num_threads(2)
    cells = [cell for cell in grid() if cell.seed in options.seeds]
    shown = ("before", "reward", "train_reward", "ess_fraction_seq", "grad_norm", "seconds")
    run_missing(cells, run, HERE / "smollm2.csv", COLUMNS, shown)


if __name__ == "__main__":
    main()
