"""vLLM on a CUDA device tells the experts that transformers' pass over the text chooses; skipped without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import CacheMode, named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.mixtures import checkpoint, own_routes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_vllm_tells_the_experts_of_each_token(tmp_path: Path, cache: CacheMode) -> None:
    """Of responses that share a prompt's cached blocks, and of some with a load in their midst."""
    from asyncrlhf.engines.vllm.core import VllmCore
    from asyncrlhf.engines.vllm.vllm_engine import VllmEngine

    model = ModelConfig(path=str(checkpoint(tmp_path / "model", hidden_size=64, head_dim=16)), dtype="float32")
    own = VllmConfig(gpu_memory_utilization=0.2, max_model_len=128, engine_kwargs={"enforce_eager": True})
    config = GeneratorConfig(engine="vllm", gpus=1, slots=8, vllm=own)
    engine = VllmEngine(VllmCore(config, model, routes=True), slots=8)
    plain = load_model(model)
    sampling = SamplingParams(max_completion_length=40)
    prompt = Prompt("", "", np.arange(3, 40))
    engine.submit([GenerationRequest(i, 0, prompt, i, sampling) for i in range(12)])
    done: list[Rollout] = []
    steps = 0
    while engine.in_flight():
        done += [g for g in engine.step(0.0).finished if isinstance(g, Rollout)]
        steps += 1
        if steps == 20:
            engine.load_weights(1, {name: tensor.clone() for name, tensor in named_weights(plain).items()}, cache)
    engine.close()
    assert len(done) == 12
    for rollout in done:
        text = np.concatenate([rollout.prompt.token_ids, rollout.response_ids])[:-1]
        assert rollout.routed_experts is not None and len(rollout.routed_experts) == len(text)
        told = np.sort(rollout.routed_experts.reshape(len(text), 3, 2).astype(np.int64), axis=2)
        assert (told == own_routes(plain, text)).mean() > 0.98, "near ties may fall either way"
