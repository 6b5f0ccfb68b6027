"""Runs an experiment's grid of short local runs, one CSV row a run, and draws it; a finished run is never repeated.

    python -m experiments.study 01_off_policyness pilot   # each method at each learning rate: pilot.csv
    python -m experiments.study 01_off_policyness grid    # each method, value and seed: runs.csv and curves.csv
    python -m experiments.study 01_off_policyness plot    # figure.png, and the README's tables on the screen

The folder's ``study.yaml`` says what is run, in overrides of `asyncrlhf train`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.environment_config import CheckpointConfig
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.tasks.build_task import build_task
from experiments.distance import measure

HERE = Path(__file__).absolute().parent
RATE = "learner.learning_rate"
KEY = ["method", "value", "learning_rate", "seed"]
RESULTS = ["reward", "greedy", "kl", "length", "train_reward"]
# Of the run's own metrics, as means over its steps.
METRICS = ["ess_fraction", "ess_fraction_seq", "behavior_kl", "policy_log_ratio_abs_mean", "entropy", "clip_fraction"]
RUN_COLUMNS = [*KEY, *RESULTS, *METRICS, "spikes", "seconds", "status"]
CURVE_COLUMNS = [*KEY, "update", "reward_mean"]
CURVE_POINTS = 20
SPIKE = 3.0  # a step's gradient norm over the run's median, from which on it is a spike


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV, and the overrides that make it."""

    method: str
    value: int
    learning_rate: float
    seed: int
    overrides: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int, float, int]:
        return self.method, self.value, self.learning_rate, self.seed


@dataclass(frozen=True)
class Study:
    """``study.yaml``: the axis with the overrides of each of its values, the methods with theirs, and the rest."""

    folder: Path
    axis: str
    values: dict[int, list[str]]
    methods: dict[str, list[str]]
    base: list[str]
    seeds: list[int]
    samples: int  # responses to each held-out prompt at the end
    pilot_value: int
    pilot_rates: list[float]
    pilot_seeds: list[int]  # other ones than those of the grid
    goal: str = "reward"  # what the pilot chooses by: most reward, or least kl
    learning_rate: float = 0.0  # 0: for each method the one with most reward in the pilot, in the mean of its seeds

    @classmethod
    def read(cls, folder: Path) -> Study:
        return cls(folder, **yaml.safe_load((folder / "study.yaml").read_text()))

    def grid(self) -> list[Cell]:
        """Seed by seed, so that an interrupted grid still covers every method and value."""
        rates = self.rates()
        return [self.cell(m, v, rates[m], s) for s, v, m in itertools.product(self.seeds, self.values, self.methods)]

    def pilot(self) -> list[Cell]:
        every = itertools.product(self.pilot_seeds, self.pilot_rates, self.methods)
        return [self.cell(method, self.pilot_value, rate, seed) for seed, rate, method in every]

    def cell(self, method: str, value: int, rate: float, seed: int) -> Cell:
        """With the ``rate``, unless the method's overrides have one."""
        own_rates = [float(o.partition("=")[2]) for o in self.methods[method] if o.startswith(f"{RATE}=")]
        rate = next(iter(own_rates), rate)
        own = [f"{RATE}={rate}", f"seed={seed}"]
        return Cell(method, value, rate, seed, (*self.base, *self.methods[method], *self.values[value], *own))

    def rates(self) -> dict[str, float]:
        """Raises ConfigError when the pilot, which decides, lacks a method."""
        if self.learning_rate:
            return dict.fromkeys(self.methods, self.learning_rate)
        path = self.folder / "pilot.csv"
        pilot = read_rows(path)
        missing = [method for method in self.methods if method not in set(pilot.method)]
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(missing)}: run the pilot first.")
        score = -pilot.kl.fillna(np.inf) if self.goal == "kl" else pilot.reward.fillna(0.0)
        means = pilot.assign(score=score).groupby(["method", "learning_rate"]).score.mean().reset_index()
        best = means.sort_values("score").groupby("method").learning_rate.last()
        return {method: float(best[method]) for method in self.methods}


def read_rows(path: Path) -> pd.DataFrame:
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=RUN_COLUMNS)


def pending(cells: Sequence[Cell], path: Path) -> list[Cell]:
    """The cells without a row in the CSV file."""
    done = set(read_rows(path)[KEY].itertuples(index=False, name=None))
    return [cell for cell in cells if cell.key not in done]


def run_cell(cell: Cell, samples: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(row, curve) of one run in this process. A run that fails is a row too, whose ``status`` names the cause."""
    key = dict(zip(KEY, cell.key, strict=True))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        try:
            row, points = _train(list(cell.overrides), samples, Path(folder) / "run")
            row |= {"status": "done"}
        except ConfigError:
            raise  # every other cell would meet it too
        except AsyncRLHFError as error:
            row, points = {"status": f"failed: {error}"}, []
    return key | row | {"seconds": time.monotonic() - started}, [key | point for point in points]


def _train(overrides: list[str], samples: int, run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    config = load_config([*overrides, f"run_dir={run_dir}"])
    # One checkpoint, of the end: the weights are read from it.
    config = replace(config, checkpoint=CheckpointConfig(every=config.steps))
    summary = train(config)
    (checkpoint,) = list_checkpoints(run_dir)
    tokenizer = load_tokenizer(config.model)
    found = measure(
        load_model(ModelConfig(path=str(checkpoint / LEARNER_FOLDER / "model"))),
        load_model(config.reference_model),
        build_task(config.task, tokenizer),
        tokenizer,
        samples=samples,
        max_completion_length=config.generator.max_completion_length,
    )
    frame = pd.DataFrame(read_metrics(run_dir / METRICS_FILE))
    outcome = {"greedy": summary["heldout_accuracy"]["after"], "train_reward": summary["reward"]["last"]}
    means = {name: float(frame[name].mean()) for name in METRICS}
    means["spikes"] = float((frame.grad_norm > SPIKE * frame.grad_norm.median()).mean())
    return found | outcome | means, curve(frame.reward_mean, config.algorithm.minibatches)


def start(study: Study) -> dict[str, float]:
    """What a run's row says of ``reward``, ``kl`` and ``length``, before any training."""
    config = load_config(study.base)
    model, reference = load_model(config.model), load_model(config.reference_model)
    tokenizer = load_tokenizer(config.model)
    length = config.generator.max_completion_length
    task = build_task(config.task, tokenizer)
    return measure(model, reference, task, tokenizer, samples=study.samples, max_completion_length=length)


def curve(rewards: pd.Series, updates_a_step: int) -> list[dict[str, Any]]:
    """The rewards of a run's steps in at most CURVE_POINTS means, each with the updates done by its end."""
    pieces = np.array_split(np.arange(len(rewards)), min(CURVE_POINTS, len(rewards)))
    return [
        {"update": int(piece[-1] + 1) * updates_a_step, "reward_mean": float(rewards.iloc[piece].mean())}
        for piece in pieces
    ]


def run_cells(cells: Sequence[Cell], samples: int, runs: Path, curves: Path, workers: int) -> None:
    """Run the cells that ``runs`` lacks, ``workers`` at a time, and append each one as it ends."""
    left = pending(cells, runs)
    print(f"{len(cells)} runs, {len(cells) - len(left)} of them done before.", flush=True)
    if not left:
        return
    # Spawned, since a fork of a process that has used torch may hang; each worker imports everything once.
    with multiprocessing.get_context("spawn").Pool(min(workers, len(left)), torch.set_num_threads, (1,)) as pool:
        jobs = [(cell, samples) for cell in left]
        for number, (row, points) in enumerate(pool.imap_unordered(_job, jobs), start=1):
            append(curves, points, CURVE_COLUMNS)
            append(runs, [row], RUN_COLUMNS)
            shown = {name: row.get(name) for name in (*KEY, "reward", "greedy", "kl", "seconds", "status")}
            print(f"{number}/{len(left)}", *(f"{name}={_short(value)}" for name, value in shown.items()), flush=True)


def _job(job: tuple[Cell, int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return run_cell(*job)


def _short(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


def append(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    if path.exists():  # an older file has fewer columns
        columns = list(pd.read_csv(path, nrows=0).columns)
    frame = pd.DataFrame(rows, columns=columns)
    frame.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a folder beside this file that holds a study.yaml")
    parser.add_argument("action", choices=("pilot", "grid", "plot"))
    parser.add_argument("--workers", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these of the study's seeds")
    parser.add_argument("--methods", nargs="+", help="only these of the study's methods")
    options = parser.parse_args()
    study = Study.read(HERE / options.experiment)
    if options.action == "plot":
        from experiments.study_plot import pilot_table, plot

        print(pilot_table(read_rows(study.folder / "pilot.csv"), list(study.methods)))
        before = start(study)
        print("before training:", {name: _short(value) for name, value in before.items()})
        plot(study.folder, study.axis, list(study.methods), before["reward"])
        return
    cells = study.grid() if options.action == "grid" else study.pilot()
    chosen = [
        c for c in cells if c.method in (options.methods or study.methods) and c.seed in (options.seeds or [c.seed])
    ]
    prefix = "" if options.action == "grid" else "pilot_"
    runs = study.folder / ("runs.csv" if options.action == "grid" else "pilot.csv")
    run_cells(chosen, study.samples, runs, study.folder / f"{prefix}curves.csv", options.workers)


if __name__ == "__main__":
    main()
