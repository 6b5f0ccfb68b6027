"""Part E: SmolLM2-135M is trained on boards that it sampled from a quarter of the cache. One CSV row a run.

python -m experiments.40_chunk_sink.train_smollm2 pilot --model smollm2-life/step-20    # the rate: trained_pilot.csv
python -m experiments.40_chunk_sink.train_smollm2 grid --model smollm2-life/step-20     # trained.csv; resumes
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.environment_config import CheckpointConfig
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.tasks.build_task import build_task
from experiments.resumable import run_missing

caches = import_module("experiments.40_chunk_sink.caches")
large = import_module("experiments.40_chunk_sink.smollm2")
lab = import_module("experiments.40_chunk_sink.train")
HERE = Path(__file__).absolute().parent
SEEDS, PILOT_SEED = (0, 1), 100
STEPS, RATE = 12, 2e-5
LAST = 4  # steps in ``train_reward``
# In the order in which they are run, all seeds of two arms before the next two: cache, share, lag, correction.
ARMS = (
    ("full", 1.0, 0, "none"),
    ("window", 0.25, 0, "none"),
    ("window", 0.25, 0, "tis"),
    ("chunk_sink-first", 0.25, 0, "none"),
    ("chunk_sink-first", 0.25, 0, "tis"),
    ("window", 0.25, 0, "decoupled"),
    ("window", 0.25, 4, "none"),
    ("window", 0.25, 4, "tis"),
)
METRICS = [
    "ess_fraction", "ess_fraction_seq", "behavior_kl", "entropy", "cache_kl", "cache_ratio_low", "cache_kept_fraction",
]  # fmt: skip
COLUMNS = ["reward", "length", "train_reward", *METRICS, "seconds", "rewards"]


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    cache: str
    share: float
    lag: int
    correction: str
    learning_rate: float
    seed: int


def grid() -> Iterator[Cell]:
    for start in range(0, len(ARMS), 2):
        for seed, arm in itertools.product(SEEDS, ARMS[start : start + 2]):
            yield Cell(*arm, RATE, seed)


def pilot() -> Iterator[Cell]:
    for rate in (RATE, 5e-5):
        yield Cell("full", 1.0, 0, "none", rate, PILOT_SEED)


def overrides(cell: Cell) -> list[str]:
    longest = large.TASKS["boards"][1]
    own = [f"async.lag={cell.lag}", f"learner.learning_rate={cell.learning_rate}", f"seed={cell.seed}"]
    if cell.cache != "full":
        kind, keep = caches.POLICIES[cell.cache]
        own.append(
            f"generator.cache={{policy:{kind},keep:{keep},share:{cell.share},window:{large.WINDOW},"
            f"every:{large.EVERY},compare_every:{caches.COMPARED}}}"
        )
    base = (
        "runtime=local", "task=reasoning_gym",
        "logging=quiet", "logging.rollouts=false", "weights.audit_every=0", "eval_every=0", "async=fixed_lag",
        f"steps={STEPS}", "batch_size=16", "num_generations=4", "generator.slots=16",
        f"generator.max_completion_length={longest}", "model.dtype=auto", "learner.mixed_precision=auto",
        "learner.token_budget=4096", "stall_timeout_seconds=1200",
    )  # fmt: skip
    return [*base, *lab.CORRECTIONS[cell.correction], *own]


def run(folder: str, cell: Cell) -> list[dict[str, Any]]:
    """The one row of a run. The final weights answer the held-out boards of part D with the whole cache."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="boards-") as made:
        config = load_config([*overrides(cell), f"model.path={folder}", f"run_dir={made}/run"])
        config = replace(config, task=replace(large.task_of("boards"), heldout_size=1))
        summary = train(replace(config, checkpoint=CheckpointConfig(every=config.steps)))
        if summary["exit_reason"] != "done":
            raise KeyboardInterrupt
        frame = pd.DataFrame(read_metrics(Path(made) / "run" / METRICS_FILE))
        (checkpoint,) = list_checkpoints(Path(made) / "run")
        final = AutoModelForCausalLM.from_pretrained(checkpoint / LEARNER_FOLDER / "model", dtype=torch.float32)
    row = held_out(final, folder) | {name: float(frame[name].mean()) for name in METRICS if name in frame}
    row |= {"train_reward": frame.reward_mean.iloc[-LAST:].mean(), "seconds": time.monotonic() - started}
    return [row | {"rewards": " ".join(f"{reward:.3f}" for reward in frame.reward_mean)}]


def held_out(model: Any, folder: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = build_task(large.task_of("boards"), tokenizer)
    prompts = task.heldout()
    rollouts = caches.answers(model, tokenizer, prompts, None, 0, large.TASKS["boards"][1])
    texts = [tokenizer.decode(rollout.response_ids, skip_special_tokens=True) for rollout in rollouts]
    rewards = [task.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return {"reward": np.mean(rewards), "length": np.mean([len(rollout.response_ids) for rollout in rollouts])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pilot", "grid"))
    parser.add_argument("--model", required=True, help="a folder of make_smollm2.py")
    options = parser.parse_args()
    torch.set_num_threads(2)
    cells, name = (pilot(), "trained_pilot.csv") if options.action == "pilot" else (grid(), "trained.csv")
    shown = ("reward", "train_reward", "ess_fraction", "behavior_kl", "cache_kl", "seconds")
    run_missing(cells, partial(run, options.model), HERE / name, COLUMNS, shown)


if __name__ == "__main__":
    main()
