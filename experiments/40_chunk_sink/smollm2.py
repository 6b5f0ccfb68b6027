"""Part D: what each policy and share of the cache does to SmolLM2-135M's answers of up to 256 tokens, without training.

python -m experiments.40_chunk_sink.smollm2    # smollm2.csv; resumes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.config.compose import load_config
from asyncrlhf.models.converted import smollm2
from asyncrlhf.tasks.build_task import build_task
from experiments.resumable import run_missing

caches = import_module("experiments.40_chunk_sink.caches")
HERE = Path(__file__).absolute().parent
LONGEST, WINDOW, EVERY = 256, 16, 8  # a share of 1/8 is 32 tokens
PROMPTS, SEEDS = 32, (0, 1)
SHARES = (0.5, 0.25, 0.125)
# Equations and word problems, which the model explains at length and does not solve.
TASK = (
    "model=smollm2", "task=reasoning_gym", "~task.dataset_options", "task.datasets=[simple_equations,gsm_symbolic]",
    "task.system_prompt='Think step by step. Explain each step in a sentence, then give the answer.'",
    f"task.heldout_size={PROMPTS}",
)  # fmt: skip
MEASURED = [name for name in caches.COLUMNS if name.startswith("cache_")]
COLUMNS = ["reward", "length", *MEASURED, "seconds"]


def grid() -> Iterator[Any]:
    for seed in SEEDS:
        yield caches.Cell("full", 1.0, seed)
        for share in SHARES:
            for policy in caches.POLICIES:
                yield caches.Cell(policy, share, seed)
        for share in (0.9, 0.8, 0.7):
            yield caches.Cell("window", share, seed)


def run(cell: Any) -> list[dict[str, Any]]:
    """The one row of one sampling of all prompts."""
    started = time.monotonic()
    folder = str(smollm2())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = build_task(load_config([*TASK]).task, tokenizer)
    prompts = task.heldout()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = caches.cache_of(cell.policy, cell.share, WINDOW, EVERY)
    rollouts = caches.answers(model, tokenizer, prompts, cache, cell.seed, LONGEST)
    texts = [tokenizer.decode(rollout.response_ids, skip_special_tokens=True) for rollout in rollouts]
    row: dict[str, Any] = {
        "length": np.mean([len(rollout.response_ids) for rollout in rollouts]),
        "reward": np.mean([task.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]),
    }
    if cache is not None:
        facts = pd.DataFrame([rollout.measured for rollout in rollouts])
        row |= {name: facts[name].mean() for name in MEASURED if name in facts}
    return [row | {"seconds": time.monotonic() - started}]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(2)
    shown = ("length", "reward", "cache_kl", "cache_ratio_low", "cache_kept_fraction", "seconds")
    run_missing(grid(), run, HERE / "smollm2.csv", COLUMNS, shown)


if __name__ == "__main__":
    main()
