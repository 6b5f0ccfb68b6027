"""Trains with vLLM in bfloat16 under no, a truncating and a masking correction: one CSV row a run, and a figure.

    python experiments/03_engine_mismatch/run.py tiny       # the packaged model: many steps, runs.csv
    python experiments/03_engine_mismatch/run.py smollm2    # SmolLM2-135M: few steps, the same file
    python experiments/03_engine_mismatch/run.py plot       # figure.png, and the README's tables on the screen

A run that has its row is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics

HERE = Path(__file__).absolute().parent
RUNS, CURVES = HERE / "runs.csv", HERE / "curves.csv"
KEY = ["part", "method", "lag", "seed"]
METHODS = {
    "none": ["algorithm=decoupled_grpo", "algorithm.correction=none"],
    "tis": ["algorithm=tis"],
    "icepop": ["algorithm=icepop"],
}
COMMON = [
    "generator=vllm",
    "runtime=local",
    "async=fixed_lag",
    "logging=quiet",
    "logging.rollouts=false",
    "weights.audit_every=1",
]
TINY = [
    "batch_size=64",
    "steps=100",
    "algorithm.minibatches=2",
    "learner.learning_rate=5e-5",
    "generator.slots=64",
    "generator.vllm.kv_cache_gb=0.1",
]
SMOLLM2 = [
    "experiment=smollm2_reasoning",
    "steps=12",
    "batch_size=16",
    "num_generations=4",
    "task.heldout_size=32",
    "generator.slots=16",
    "generator.vllm.max_model_len=256",
    "generator.vllm.kv_cache_gb=0.5",
    "learner.lr_schedule=constant",
]
# What a part is, and the methods it is run with: the control has no mismatch to correct.
PARTS: dict[str, dict[str, list[str]]] = {
    "tiny": {
        "tiny, bf16 engine": [*TINY, "model.dtype=bfloat16"],
        "tiny, float32 engine": [*TINY, "model.dtype=float32"],
    },
    "smollm2": {"SmolLM2, bf16 engine": SMOLLM2},
}
CONTROL = "tiny, float32 engine"
# Of the run's own metrics: means over its steps, but for the largest.
MEANS = [
    "mismatch_kl", "behavior_kl", "behavior_log_ratio_abs_mean", "ess_fraction", "ess_fraction_seq",
    "response_length_mean", "staleness_mean",
]  # fmt: skip
LARGEST = "behavior_log_ratio_abs_max"
CUT = ("behavior_truncated_fraction", "behavior_masked_fraction")  # of the tokens; a method has one of them
COLUMNS = [
    *KEY, "first", "last", "heldout_before", "heldout_after",
    *MEANS, LARGEST, "mismatch_kl_max", "cut_fraction", "seconds",
]  # fmt: skip
SHOWN = {"mismatch_kl": "mismatch_kl: random tokens", "behavior_kl": "behavior_kl: the batch"}


@dataclass(frozen=True)
class Cell:
    part: str
    method: str
    lag: int
    seed: int
    settings: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.part, self.method, self.lag, self.seed


def cells(which: str, seeds: Sequence[int]) -> list[Cell]:
    """Seed by seed, so that an interrupted run still has every method."""
    found = []
    for seed, lag, (part, settings) in itertools.product(seeds, (0, 1), PARTS[which].items()):
        for method, own in METHODS.items():
            if part != CONTROL or method == "none":
                overrides = [*settings, *own, *COMMON, f"async.lag={lag}", f"seed={seed}"]
                found.append(Cell(part, method, lag, seed, tuple(overrides)))
    return found


def run_cell(cell: Cell) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mismatch-") as folder:
        run_dir = Path(folder) / "run"
        summary = train(load_config([*cell.settings, f"run_dir={run_dir}"]))
        frame = pd.DataFrame(read_metrics(run_dir / METRICS_FILE))
    key = dict(zip(KEY, cell.key, strict=True))
    quarter = max(1, len(frame) // 4)
    row = {
        "first": frame.reward_mean.head(quarter).mean(),
        "last": frame.reward_mean.tail(quarter).mean(),
        "heldout_before": summary["heldout_accuracy"]["before"],
        "heldout_after": summary["heldout_accuracy"]["after"],
        **{name: frame[name].mean() for name in MEANS if name in frame},
        LARGEST: frame[LARGEST].max(),
        "mismatch_kl_max": frame.mismatch_kl.max(),
        "cut_fraction": sum(float(frame[name].mean()) for name in CUT if name in frame),
        "seconds": time.monotonic() - started,
    }
    curve = frame[["step", "reward_mean", "mismatch_kl", "behavior_kl"]].to_dict("records")
    return key | row, [key | point for point in curve]


def append(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    frame = pd.DataFrame(rows, columns=columns)
    frame.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")


def run_all(which: str, seeds: Sequence[int], methods: Sequence[str]) -> None:
    """Each run in a process of its own, since vLLM keeps memory until its process ends."""
    done = set(pd.read_csv(RUNS)[KEY].itertuples(index=False, name=None)) if RUNS.exists() else set()
    left = [cell for cell in cells(which, seeds) if cell.key not in done and cell.method in methods]
    print(f"{len(left)} runs are left.", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,), max_tasks_per_child=1) as pool:
        for cell in left:
            row, curve = pool.submit(run_cell, cell).result()
            append(CURVES, curve)
            append(RUNS, [row], COLUMNS)
            shown = (f"{name}={v:.3g}" if isinstance(v, float) else v for name, v in row.items())
            print(*shown, flush=True)


def plot() -> None:
    """Reward and mismatch of every part, a point a run, a bar the seeds' mean; the figures as text."""
    runs = pd.read_csv(RUNS)
    parts = [part for which in PARTS.values() for part in which if part in set(runs.part)]
    figure, axes = plt.subplots(2, len(parts), figsize=(4.6 * len(parts), 7), constrained_layout=True, squeeze=False)
    for column, part in enumerate(parts):
        mine = runs[runs.part == part]
        above, below = axes[0][column], axes[1][column]
        for number, method in enumerate(m for m in METHODS if m in set(mine.method)):
            own = mine[mine.method == method]
            place = own.lag + 0.15 * (number - 1)
            above.scatter(place, own["last"], s=18, label=method, color=f"C{number}")
            means = own.groupby("lag")["last"].mean()
            above.scatter(means.index + 0.15 * (number - 1), means, marker="_", s=400, color=f"C{number}")
            for marker, (name, said) in zip("ox", SHOWN.items(), strict=True):
                label = said if number == 0 else None
                below.scatter(place, own[name], s=18, marker=marker, color=f"C{number}", label=label)
        above.axhline(mine["first"].mean(), color="grey", linestyle=":", linewidth=1)
        above.set(title=part, ylabel="reward, last quarter (dotted: first)")
        below.set(yscale="log", ylim=(1e-13, 1), ylabel="nats")
        for place, where in ((above, "best"), (below, "center right")):
            place.set(xlabel="lag", xticks=[0, 1], xlim=(-0.5, 1.5))
            place.legend(fontsize=8, loc=where)
    figure.savefig(HERE / "figure.png", dpi=110)
    grouped = runs.groupby(["part", "lag", "method"])
    shown = ["last", "heldout_after", *MEANS[:5], LARGEST, "cut_fraction"]
    table = pd.DataFrame({name: grouped[name].mean() for name in shown})
    table.insert(1, "sd", grouped["last"].std())
    print(table.to_string(float_format=lambda x: f"{x:.4g}"))
    for (part, lag), own in runs.groupby(["part", "lag"]):
        by_seed = own.pivot(index="seed", columns="method", values="last")
        for method in [m for m in ("tis", "icepop") if m in by_seed]:
            gap = (by_seed[method] - by_seed["none"]).dropna()
            print(f"{part}, lag {lag}, {method} - none: {gap.mean():+.4f} +- {gap.sem():.4f} ({len(gap)} seeds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=[*PARTS, "plot"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    options = parser.parse_args()
    if options.action == "plot":
        plot()
    else:
        run_all(options.action, options.seeds, options.methods)


if __name__ == "__main__":
    main()
