"""Part A, without training: what each policy and share of the cache costs in reward, and how far the sampler moves.

python -m experiments.40_chunk_sink.caches --model tiny-ledger/step-NNN    # caches.csv; resumes
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from experiments.study import append

ledger = import_module("experiments.40_chunk_sink.ledger")
HERE = Path(__file__).absolute().parent
POLICIES = {
    "window": ("window", "first"),
    "heavy_hitters": ("heavy_hitters", "first"),
    "separators": ("separators", "first"),
    "chunk_sink-first": ("chunk_sink", "first"),
    "chunk_sink-last": ("chunk_sink", "last"),
    "chunk_sink-both": ("chunk_sink", "both"),
}
SHARES, SEEDS = (0.5, 0.25, 0.125), (0, 1, 2)
WINDOW, EVERY, SLOTS = 6, 4, 256  # a share of 1/8 is 12 tokens, one more than the least
COMPARED = 4  # one answer of so many is compared with the whole cache
MORE = [("window", share) for share in (0.9, 0.8, 0.7, 0.6)]  # where its lower tail passes Sparrow's 0.86
KEY = ["policy", "share", "seed"]
MEASURED = ["cache_kl", "cache_kl/1", "cache_kl/2", "cache_kl/3", "cache_kl/4", "cache_ratio_low"]
FACTS = ["cache_kept_fraction", "cache_bytes"]
COLUMNS = [*KEY, "reward", "reward_se", "lines", "repeated", "length", *MEASURED, *FACTS, "seconds"]


@dataclass(frozen=True)
class Cell:
    """One sampling of all test prompts: its key in the CSV."""

    policy: str
    share: float
    seed: int


def grid() -> Iterator[Cell]:
    for seed in SEEDS:
        yield Cell("full", 1.0, seed)
        for share in SHARES:
            for policy in POLICIES:
                yield Cell(policy, share, seed)
    for (policy, share), seed in itertools.product(MORE, SEEDS):
        yield Cell(policy, share, seed)


def cache_of(policy: str, share: float, window: int = WINDOW, every: int = EVERY) -> CacheConfig | None:
    if policy == "full":
        return None
    kind, keep = POLICIES[policy]
    return CacheConfig(kind, share=share, window=window, every=every, keep=keep, compare_every=COMPARED)


def sample(model: Any, tokenizer: Any, asked: Sequence[str], cache: CacheConfig | None, seed: int) -> list[Rollout]:
    """One answer to each prompt, at temperature 1."""
    prompts = [Prompt(str(i), text, np.asarray(tokenizer(text).input_ids)) for i, text in enumerate(asked)]
    return answers(model, tokenizer, prompts, cache, seed, ledger.LONGEST)


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], cache: CacheConfig | None, seed: int, longest: int
) -> list[Rollout]:
    """One answer of at most ``longest`` tokens to each prompt, at temperature 1."""
    engine = HFEngine(model, slots=min(SLOTS, len(prompts)), cache=cache, longest=longest)
    engine.decode = tokenizer.decode
    sampling = SamplingParams(longest, stop_token_ids=(tokenizer.eos_token_id,))
    engine.submit([GenerationRequest(i, i, prompt, seed * 10**6 + i, sampling) for i, prompt in enumerate(prompts)])
    found: dict[int, Rollout] = {}
    while engine.in_flight():
        for rollout in engine.step(0.0).finished:
            assert isinstance(rollout, Rollout), rollout
            found[rollout.rollout_id] = rollout
    return [found[i] for i in range(len(prompts))]


def rewards(tokenizer: Any, asked: Sequence[str], rollouts: Sequence[Rollout]) -> np.ndarray:
    """[N, 2]: the right share of lines, and of repeated totals."""
    texts = [tokenizer.decode(rollout.response_ids, skip_special_tokens=True) for rollout in rollouts]
    return np.array([ledger.halves(prompt, text) for prompt, text in zip(asked, texts, strict=True)])


def run(cell: Cell, model: Any, tokenizer: Any) -> dict[str, Any]:
    started = time.monotonic()
    asked = ledger.prompts(2, ledger.TEST)
    rollouts = sample(model, tokenizer, asked, cache_of(cell.policy, cell.share), cell.seed)
    scored = rewards(tokenizer, asked, rollouts)
    both = scored.mean(1)
    row = dict(zip(KEY, astuple(cell), strict=True))
    row |= {"reward": both.mean(), "reward_se": both.std(ddof=1) / len(both) ** 0.5}
    row |= {"lines": scored[:, 0].mean(), "repeated": scored[:, 1].mean()}
    row |= {"length": np.mean([len(rollout.response_ids) for rollout in rollouts])}
    if cell.policy != "full":
        facts = pd.DataFrame([rollout.measured for rollout in rollouts])
        row |= {name: facts[name].mean() for name in (*MEASURED, *FACTS) if name in facts}
    return row | {"seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of make_checkpoint.py")
    parser.add_argument("--csv", type=Path, default=HERE / "caches.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    known = pd.read_csv(options.csv) if options.csv.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(known[KEY].itertuples(index=False, name=None))
    for cell in grid():
        if astuple(cell) not in done:
            row = run(cell, AutoModelForCausalLM.from_pretrained(options.model), tokenizer)
            append(options.csv, [row], COLUMNS)
            shown = ("reward", "lines", "repeated", "cache_kl", "cache_ratio_low", "cache_kept_fraction", "seconds")
            print(*astuple(cell), *(f"{name}={row.get(name, float('nan')):.3f}" for name in shown), flush=True)


if __name__ == "__main__":
    main()
