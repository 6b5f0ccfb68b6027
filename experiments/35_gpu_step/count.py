"""What a learner's step asks of a GPU, counted without one: launches, waits of the host, casts, bytes, peak memory.

python -m experiments.35_gpu_step.count 135m 16384 8 bfloat16      # shape, tokens, sequences, precision
python -m experiments.35_gpu_step.count 135m 65536 128 bfloat16 gradient_checkpointing=true
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch

from asyncrlhf.bench.checkpoint import batch, build
from asyncrlhf.learner import rank_models
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from tests.pretended_gpu import learner_on_gpu


def count(shape: str, tokens: int, sequences: int, precision: str, **learner: Any) -> dict[str, Any]:
    """Of the second step; the first one allocates the optimizer's states."""
    with torch.device("meta"):
        model = build(shape)
    given = batch(shape, tokens, sequences)
    config = LearnerConfig(token_budget=tokens, gpus=1, mixed_precision=precision, **learner)
    card = mock.patch.object(rank_models, "free_bytes", lambda _: 30e9)  # for gradient_checkpointing=null
    with card, learner_on_gpu([model], AlgorithmConfig(), config) as (gpu, trained):
        trained.train_step(given)
        counts = gpu.fresh()
        trained.train_step(given)
    moved = {kind: round(size / 1e9, 1) for kind, size in counts.bytes.items()}
    facts = {"launches": counts.launched, "waits": counts.waits, "casts": counts.casts, "gigabytes": moved}
    return {**facts, "peak_gigabytes": round(counts.peak / 1e9, 1)}


def main(shape: str, tokens: str, sequences: str, precision: str, *more: str) -> None:
    options = {key: json.loads(value) for key, value in (word.split("=") for word in more)}
    print(json.dumps(count(shape, int(tokens), int(sequences), precision, **options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
