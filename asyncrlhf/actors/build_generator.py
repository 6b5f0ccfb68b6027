"""Builds the worker of a generator replica from its spec: tokenizer, engine and weight receiver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from asyncrlhf.actors.worker import GeneratorSpec, GeneratorWorker
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.build_engine import build_engine
from asyncrlhf.engines.engine import AdapterMerge
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.engines.vllm.memory_share import with_share
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.models.vocabulary import sampled_vocabulary
from asyncrlhf.transport.build_transport import build_receiver, streams
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, IntArray


def taken_by_workers(generator: GeneratorConfig, model: ModelConfig, weights: WeightsConfig, runtime: str) -> bool:
    """Whether the engine's workers receive the weights, and not the replica's own process.

    A single worker lives in that process: it gets the tensors by reference, and one broadcast serves all replicas.
    """
    return has_workers(generator, model) and streams(weights, runtime)


def has_workers(generator: GeneratorConfig, model: ModelConfig) -> bool:
    """Whether the engine has processes of its own, which can load whole weights by themselves."""
    return generator.engine == "vllm" and generator.vllm.workers > 1 and model.lora.r == 0


def build_worker(spec: GeneratorSpec, clock: Callable[[], float] = time.monotonic) -> GeneratorWorker:
    """Load the model and the engine; the caller has set the process's thread count."""
    tokenizer = load_tokenizer(spec.model)
    device = "cuda" if spec.generator.gpus > 0 else "cpu"

    @lru_cache(maxsize=4096)
    def encoded(text: str) -> IntArray:
        return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def answer_ids(request: GenerationRequest) -> IntArray | None:
        return None if request.prompt.answer is None else encoded(request.prompt.answer)

    generator = spec.generator
    if spec.beside_bytes:
        generator = with_share(generator, spec.model, spec.name, spec.beside_bytes, spec.part_of_rest)
    engine = build_engine(
        generator,
        spec.model,
        load_model=lambda model: load_model(model, device),
        vocab_size=sampled_vocabulary(spec.model, tokenizer),
        answer_ids=answer_ids,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        offloads=spec.offloads,
        routes=spec.routes,
    )

    decode: Callable[..., Any] = partial(tokenizer.decode, skip_special_tokens=True)
    adapted = spec.model.lora.r > 0 and spec.generator.engine != "fake" and not engine.adapts
    merge = AdapterMerge(spec.model.lora, engine.parameters()) if adapted else None
    receiver = build_receiver(spec.weights, spec.runtime, device)
    weights, relays, direct = spec.weights, spec.weights.relay, None
    if taken_by_workers(spec.generator, spec.model, weights, spec.runtime):
        direct = weights
    elif relays and has_workers(spec.generator, spec.model):
        direct = replace(weights, transport="shared_memory", delta="none")
    return GeneratorWorker(spec.name, engine, decode, receiver, merge, spec.chunk_tokens, clock, direct, relays)
