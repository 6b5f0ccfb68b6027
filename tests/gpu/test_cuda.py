"""The learner and the engine on a CUDA device give what they give on the CPU; skipped visibly without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.packing import pack
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.learner.updates.optimizers import build_optimizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams, TrainSample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def sample(device: str) -> list[Rollout]:
    engine = HFEngine(load_model(ModelConfig(), device), slots=8)
    prompt = Prompt("p", "", np.arange(3, 9))
    sampling = SamplingParams(max_completion_length=8, temperature=0.8)
    engine.submit([GenerationRequest(i, i // 4, prompt, i, sampling) for i in range(8)])
    done: list[Rollout] = []
    while engine.in_flight():
        done += [g for g in engine.step(0.0).finished if isinstance(g, Rollout)]
    return sorted(done, key=lambda g: g.rollout_id)


def test_the_engine_samples_the_same_tokens() -> None:
    for ours, theirs in zip(sample("cuda"), sample("cpu"), strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-4)


def test_the_learner_takes_the_same_step(tmp_path: Path) -> None:
    samples = [TrainSample(r, float(r.rollout_id % 2)) for r in sample("cpu")]
    weights = {}
    for device in ("cpu", "cuda"):
        spec = BackendSpec(learner=LearnerConfig(learning_rate=1e-3), algorithm=AlgorithmConfig(), steps=1)
        learner = TorchBackend(load_model(ModelConfig(), device), spec, device=device)
        learner.train_step(pack(samples))
        weights[device] = {name: tensor.cpu() for name, tensor in learner.parameters().items()}
    for name, tensor in weights["cpu"].items():
        torch.testing.assert_close(weights["cuda"][name], tensor, atol=1e-3, rtol=1e-2)


def test_eight_bit_adamw_steps_as_adamw_does() -> None:
    pytest.importorskip("bitsandbytes")
    moved = {}
    for optim in ("adamw", "adamw_8bit"):
        model = load_model(ModelConfig(), "cuda", dtype=torch.float32)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = build_optimizer(LearnerConfig(optim=optim, gpus=1, learning_rate=1e-3), model, None)
        for seed in range(3):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        moved[optim] = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    gap = (moved["adamw"] - moved["adamw_8bit"]).norm() / moved["adamw"].norm()
    assert 0 < gap < 0.1
