"""Part B: training on answers from a compressed cache, under six corrections and lags 0 and 4. One CSV row a run.

python -m experiments.40_chunk_sink.train --model tiny-ledger/step-NNN    # runs.csv and curves.csv; resumes
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.environment_config import CheckpointConfig
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from experiments.study import append

ledger = import_module("experiments.40_chunk_sink.ledger")
caches = import_module("experiments.40_chunk_sink.caches")
HERE = Path(__file__).absolute().parent
CORRECTIONS = {
    "none": ("algorithm=grpo", "algorithm.aggregate=token"),
    "tis": ("algorithm=tis",),
    "decoupled": ("algorithm=decoupled_grpo",),
    "icepop": ("algorithm=icepop",),  # tokens with a ratio outside of 0.5 to 5 leave the loss
    "tail": ("algorithm=icepop", "algorithm.correction_low=0.86"),  # the lower tail by Sparrow's threshold, by token
    "seq_mask": ("algorithm=seq_mask",),  # sequences with a product of ratios outside of 0.5 to 5 leave it
    # Sequences with a mean ratio outside of 0.1 to 10, which is another measure than their product.
    "geo_mask": ("algorithm=geo_mask", "algorithm.correction_low=0.1", "algorithm.correction_high=10"),
}
# In the order in which they are run: cache, share, lag, correction.
ARMS = (
    ("full", 1.0, 0, "decoupled"),
    ("chunk_sink-first", 0.5, 0, "none"),
    ("chunk_sink-first", 0.5, 0, "tis"),
    ("full", 1.0, 4, "decoupled"),
    ("chunk_sink-first", 0.5, 0, "decoupled"),
    ("window", 0.5, 0, "none"),
    ("window", 0.5, 0, "tis"),
    ("chunk_sink-first", 0.5, 4, "decoupled"),
    ("chunk_sink-first", 0.5, 0, "icepop"),
    ("chunk_sink-first", 0.5, 0, "seq_mask"),
    ("chunk_sink-first", 0.5, 4, "none"),
    ("chunk_sink-both", 0.5, 0, "tis"),
    ("full", 1.0, 4, "none"),
    ("chunk_sink-first", 0.5, 4, "tis"),
    ("window", 0.5, 0, "decoupled"),
    ("chunk_sink-last", 0.5, 0, "tis"),
    ("chunk_sink-first", 0.5, 0, "tail"),
    ("window", 0.25, 0, "tis"),
    ("window", 0.8, 0, "none"),
    ("chunk_sink-first", 0.5, 0, "geo_mask"),
)
SEEDS, STEPS, RATE = (0, 1, 2), 32, 2e-5
COMPARED, LAST = 4, 10  # one rollout of so many is compared with the whole cache; steps in ``train_reward``
KEY = ["cache", "share", "lag", "correction", "learning_rate", "seed"]
METRICS = [
    "ess_fraction", "ess_fraction_seq", "behavior_kl", "entropy", "cache_kl", "cache_kl/1", "cache_kl/2", "cache_kl/3",
    "cache_kl/4", "cache_ratio_low", "cache_kept_fraction",
]  # fmt: skip
COLUMNS = [*KEY, "reward", "lines", "repeated", "train_reward", *METRICS, "seconds"]
BASE = (
    "runtime=local", "task=prompts", "reward.kind=python", "reward.target=experiments.40_chunk_sink.ledger:reward",
    "logging=quiet", "logging.rollouts=false", "weights.audit_every=0", "eval_every=0", "task.heldout_size=1",
    "async=fixed_lag", f"steps={STEPS}", "batch_size=64", "num_generations=8", "generator.slots=64",
    f"generator.max_completion_length={ledger.LONGEST}",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run: its key in the CSV."""

    cache: str
    share: float
    lag: int
    correction: str
    learning_rate: float
    seed: int


def overrides(cell: Cell) -> list[str]:
    own = [f"async.lag={cell.lag}", f"learner.learning_rate={cell.learning_rate}", f"seed={cell.seed}"]
    if cell.cache != "full":
        kind, keep = caches.POLICIES[cell.cache]
        own.append(
            f"generator.cache={{policy:{kind},keep:{keep},share:{cell.share},window:{caches.WINDOW},"
            f"every:{caches.EVERY},compare_every:{COMPARED}}}"
        )
    return [*BASE, *CORRECTIONS[cell.correction], *own]


def grid() -> Iterator[Cell]:
    """Two arms at a time, seed by seed, so that an interrupted grid has all seeds of the first arms."""
    for start in range(0, len(ARMS), 2):
        for seed, arm in itertools.product(SEEDS, ARMS[start : start + 2]):
            yield Cell(*arm, RATE, seed)


def run(cell: Cell, model: str) -> tuple[dict[str, Any], list[float]]:
    """The row of one run, and its rewards by step. The final weights answer the test prompts with the whole cache."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chunk-sink-") as folder:
        rows = Path(folder) / "prompts.jsonl"
        ledger.write_rows(rows)
        given = [*overrides(cell), f"model.path={model}", f"task.path={rows}", f"run_dir={folder}/run"]
        config = load_config(given)
        config = replace(config, checkpoint=CheckpointConfig(every=config.steps))
        summary = train(config)
        if summary["exit_reason"] != "done":
            raise KeyboardInterrupt
        frame = pd.DataFrame(read_metrics(Path(folder) / "run" / METRICS_FILE))
        (checkpoint,) = list_checkpoints(Path(folder) / "run")
        final = AutoModelForCausalLM.from_pretrained(checkpoint / LEARNER_FOLDER / "model")
    tokenizer, asked = AutoTokenizer.from_pretrained(model), ledger.prompts(2, ledger.TEST)
    lines, repeated = caches.rewards(tokenizer, asked, caches.sample(final, tokenizer, asked, None, 0)).mean(0)
    row = dict(zip(KEY, astuple(cell), strict=True))
    row |= {"reward": (lines + repeated) / 2, "lines": lines, "repeated": repeated}
    row |= {"train_reward": frame.reward_mean.iloc[-LAST:].mean()}
    row |= {name: float(frame[name].mean()) for name in METRICS if name in frame}
    return row | {"seconds": time.monotonic() - started}, frame.reward_mean.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of make_checkpoint.py")
    parser.add_argument("--folder", type=Path, default=HERE, help="where runs.csv and curves.csv are")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="only each n-th run: which, and n")
    parser.add_argument("--until", default="99:99", help="no run begins after this time, HH:MM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path, curves = options.folder / "runs.csv", options.folder / "curves.csv"
    which, parts = options.part
    for cell in list(grid())[which::parts]:
        known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
        if astuple(cell) in set(known[KEY].itertuples(index=False, name=None)):
            continue
        if time.strftime("%H:%M") >= options.until:
            break
        row, points = run(cell, options.model)
        steps = [{**row, "step": step, "reward_mean": reward} for step, reward in enumerate(points)]
        append(curves, steps, [*KEY, "step", "reward_mean"])
        append(path, [row], COLUMNS)
        shown = ("reward", "lines", "repeated", "train_reward", "ess_fraction", "behavior_kl", "cache_kl", "seconds")
        print(*astuple(cell), *(f"{name}={row.get(name, float('nan')):.3g}" for name in shown), flush=True)


if __name__ == "__main__":
    main()
