"""Part C, without training: whether the distances of an older version and of a smaller cache add up.

The sampler is an earlier checkpoint of make_checkpoint.py with a smaller cache; the policy is the last one, whole.

python -m experiments.40_chunk_sink.both --folder tiny-ledger    # both.csv; resumes
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import Rollout
from experiments.study import append

ledger = import_module("experiments.40_chunk_sink.ledger")
caches = import_module("experiments.40_chunk_sink.caches")
HERE = Path(__file__).absolute().parent
STEPS = (600, 550, 450)  # of the sampler; the policy is the first
CACHES = (("full", 1.0), ("window", 0.7), ("window", 0.5), ("chunk_sink-first", 0.5))
KEY = ["steps", "cache", "share", "seed"]
COLUMNS = [*KEY, "reward", "kl", "ess", "low", "seconds"]
CLAMP = 20.0  # nats: the largest log-ratio, as in the package


def logprobs(model: Any, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Of each response's tokens [L], with the whole cache."""
    engine = HFEngine(model, slots=1)
    texts = [np.concatenate([r.prompt.token_ids, r.response_ids]) for r in rollouts]
    return [found[len(r.prompt.token_ids) - 1 :] for found, r in zip(engine.score(texts), rollouts, strict=True)]


def distance(policy: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> dict[str, float]:
    """``kl``: KL(sampler || policy), nats a token, as the mean of k3; ``ess``: the effective share of the
    tokens; ``low``: the 5% quantile of the ratios."""
    apart = np.concatenate(policy).astype(np.float64) - np.concatenate(sampler)
    ratios = apart.clip(-CLAMP, CLAMP)
    weights = np.exp(ratios)
    ess = weights.sum() ** 2 / len(weights) / (weights**2).sum()
    kl, low = (np.expm1(ratios) - ratios).mean(), np.exp(np.quantile(apart, 0.05))
    return {"kl": float(kl), "ess": float(ess), "low": float(low)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of make_checkpoint.py, with its steps")
    parser.add_argument("--csv", type=Path, default=HERE / "both.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def load(steps: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(options.folder / f"step-{steps}")

    tokenizer = AutoTokenizer.from_pretrained(options.folder / f"step-{STEPS[0]}")
    asked = ledger.prompts(2, ledger.TEST)
    known = pd.read_csv(options.csv) if options.csv.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(known[KEY].itertuples(index=False, name=None))
    for seed, steps, (cache, share) in itertools.product(caches.SEEDS, STEPS, CACHES):
        key = (steps, cache, share, seed)
        if key in done:
            continue
        started = time.monotonic()
        rollouts = caches.sample(load(steps), tokenizer, asked, caches.cache_of(cache, share), seed)
        found = distance(logprobs(load(STEPS[0]), rollouts), [r.behavior_logprobs for r in rollouts])
        found["reward"] = float(caches.rewards(tokenizer, asked, rollouts).mean())
        row = dict(zip(KEY, key, strict=True)) | found | {"seconds": time.monotonic() - started}
        append(options.csv, [row], COLUMNS)
        print(*key, *(f"{name}={row[name]:.3g}" for name in COLUMNS[len(KEY) :]), flush=True)


if __name__ == "__main__":
    main()
