"""Memory of the cache and speed of decoding with part of it, against the whole one, alternated on the same machine.

python -m experiments.40_chunk_sink.speed [135m|tiny] [SLOTS] [LENGTH] [ROUNDS]
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams

PROMPT = 20
SIZES = {  # SmolLM2-135M's shape, and the packaged checkpoint's width
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
CACHES = {
    "full": None,
    "window": CacheConfig("window", share=0.25, compare_every=0),
    "heavy_hitters": CacheConfig("heavy_hitters", share=0.25, compare_every=0),
    "chunk_sink": CacheConfig("chunk_sink", share=0.25, compare_every=0),
}


def run(size: str, cache: CacheConfig | None, slots: int, length: int) -> tuple[float, int]:
    """Tokens/s of one batch of ``slots`` sequences, and the cache's bytes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**SIZES[size], max_position_embeddings=PROMPT + length, tie_word_embeddings=True)
    )
    engine = HFEngine(model, slots=slots, cache=cache, longest=length)
    rng = np.random.default_rng(0)
    prompts = [Prompt("", "", rng.integers(1, 500, PROMPT)) for _ in range(slots)]
    engine.submit([GenerationRequest(i, i, prompts[i], i, SamplingParams(length)) for i in range(slots)])
    engine.step(0.0)  # the prefill
    started, tokens = time.perf_counter(), 0
    while engine.in_flight():
        tokens += engine.step(0.0).tokens
    return tokens / (time.perf_counter() - started), engine._passes.nbytes


def main(size: str = "135m", slots: int = 64, length: int = 512, rounds: int = 3) -> None:
    found: dict[str, list[float]] = {name: [] for name in CACHES}
    size_of: dict[str, int] = {}
    for _ in range(rounds):
        for name, cache in CACHES.items():
            speed, size_of[name] = run(size, cache, slots, length)
            found[name].append(speed)
            print(f"{name:14} {speed:8.0f} tokens/s  {size_of[name] / 1e6:8.1f} MB", flush=True)
    for name, speeds in found.items():
        ratios = [own / full for own, full in zip(speeds, found["full"], strict=True)]
        row = {
            "model": size, "slots": slots, "length": length, "cache": name, "rounds": rounds,
            "bytes_share": round(size_of[name] / size_of["full"], 4),
            "speed_ratio": [round(float(x), 3) for x in (np.median(ratios), min(ratios), max(ratios))],
        }  # fmt: skip
        print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
