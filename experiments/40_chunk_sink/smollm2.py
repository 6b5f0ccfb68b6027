"""Part D, without training: what each policy and share of the cache does to answers of SmolLM2-135M.

python -m experiments.40_chunk_sink.smollm2 boards --model smollm2-life/step-20    # boards.csv; resumes
python -m experiments.40_chunk_sink.smollm2 words                                  # words.csv; resumes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.models.converted import smollm2
from asyncrlhf.tasks.build_task import build_task
from experiments.resumable import run_missing

caches = import_module("experiments.40_chunk_sink.caches")
made = import_module("experiments.40_chunk_sink.make_smollm2")
HERE = Path(__file__).absolute().parent
WINDOW, EVERY = 16, 8
PROMPTS, SEEDS = 24, (0, 1)
SHARES = (0.5, 0.25)
# A board has 290 tokens of JSON, most of them the same; the equations and word problems are explained at length, in
# words, and not solved: the model of the second task is SmolLM2 as it is.
BOARDS = {"datasets": ["game_of_life"], "dataset_options": {"game_of_life": made.BOARD}, "max_prompt_length": 700}
WORDS = {
    "datasets": ["simple_equations", "gsm_symbolic"],
    "system_prompt": "Think step by step. Explain each step in a sentence, then give the answer.",
}
TASKS: dict[str, tuple[dict[str, Any], int]] = {"boards": (BOARDS, 320), "words": (WORDS, 256)}  # longest answers
MEASURED = [name for name in caches.COLUMNS if name.startswith("cache_")]
COLUMNS = ["reward", "length", *MEASURED, "seconds"]


def grid() -> Iterator[Any]:
    for seed in SEEDS:
        yield caches.Cell("full", 1.0, seed)
        for share in SHARES:
            for policy in caches.POLICIES:
                yield caches.Cell(policy, share, seed)
        yield caches.Cell("window", 0.8, seed)


def task_of(kind: str) -> TaskConfig:
    return TaskConfig(kind="reasoning_gym", chat_template=True, heldout_size=PROMPTS, **TASKS[kind][0])


def run(kind: str, folder: str, cell: Any) -> list[dict[str, Any]]:
    """The one row of one sampling of all prompts."""
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = build_task(task_of(kind), tokenizer)
    prompts = task.heldout()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = caches.cache_of(cell.policy, cell.share, WINDOW, EVERY)
    rollouts = caches.answers(model, tokenizer, prompts, cache, cell.seed, TASKS[kind][1])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", default="", help="the folder of make_smollm2.py; default: SmolLM2 as it is")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = [cell for cell in grid() if cell.seed in options.seeds]
    shown = ("length", "reward", "cache_kl", "cache_ratio_low", "cache_kept_fraction", "seconds")
    made_from = options.model or str(smollm2())
    run_missing(cells, partial(run, options.task, made_from), HERE / f"{options.task}.csv", COLUMNS, shown)


if __name__ == "__main__":
    main()
