"""Sleeping engines give a CUDA device's memory back and go on where they were; skipped visibly without one."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import Engine, named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.learner.asleep import RankSleep
from asyncrlhf.learner.deterministic import deterministic
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.unit.learner.worlds import backend, llama, random_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
TEXT = [np.arange(3, 15)]


def make_engine(kind: str) -> Engine:
    if kind == "hf":
        return HFEngine(load_model(ModelConfig(), "cuda"), slots=8)
    from asyncrlhf.engines.vllm.core import VllmCore
    from asyncrlhf.engines.vllm.vllm_engine import VllmEngine

    own = VllmConfig(
        sleep_level=1, gpu_memory_utilization=0.2, max_model_len=128, engine_kwargs={"enforce_eager": True}
    )
    return VllmEngine(VllmCore(GeneratorConfig(engine="vllm", gpus=1, slots=8, vllm=own), ModelConfig()), slots=8)


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=needs_vllm)])
def test_a_sleeping_engine_frees_the_device_and_goes_on(kind: str) -> None:
    engine = make_engine(kind)
    sampling = SamplingParams(max_completion_length=40)
    engine.submit([GenerationRequest(i, i, Prompt("", "", np.arange(3, 9)), i, sampling) for i in range(8)])
    for _ in range(6):
        engine.step(0.0)
    scores, awake = engine.score(TEXT)[0], used()
    engine.sleep()
    asleep = used()
    assert asleep < awake
    new = {name: 1.1 * tensor.cpu() for name, tensor in named_weights(load_model(ModelConfig())).items()}
    engine.load_weights(1, new, "keep")
    assert used() <= asleep + (16 << 20)
    assert np.abs(engine.score(TEXT)[0] - scores).max() > 1e-3
    engine.wake()
    done: list[Rollout] = []
    while engine.in_flight():
        done += [g for g in engine.step(0.0).finished if isinstance(g, Rollout)]
    assert len(done) == 8
    assert all(set(g.policy_versions.tolist()) <= {0, 1} for g in done)
    assert any(set(g.policy_versions.tolist()) == {0, 1} for g in done)
    engine.close()


def weights_after(steps: int, sleeps: bool, repeatable: bool) -> torch.Tensor:
    """All weights after some learner steps; ``sleeps``: between them, with nothing left on the device."""
    with deterministic(repeatable):
        config = LearnerConfig(learning_rate=1e-2, gpus=1, deterministic=repeatable)
        rank = backend(learner=config, model=llama(hidden_size=512), device="cuda")
        sleeper = RankSleep(rank)
        for seed in range(steps):
            rank.train_step(random_batch(seed=seed))
            if sleeps:
                awake = used()
                sleeper.sleep()
                assert sleeper._offload.resident_bytes(sleeper._tensors()) == 0 and used() < awake
                sleeper.wake()
        return torch.cat([tensor.detach().flatten().cpu() for tensor in rank.parameters().values()])


def test_a_sleeping_learner_frees_the_device_and_goes_on() -> None:
    awake, again, slept = (weights_after(3, sleeps, repeatable=True) for sleeps in (False, False, True))
    assert torch.equal(awake, again), "learner.deterministic does not keep what it promises"
    assert torch.equal(awake, slept)


def test_without_determinism_sleep_changes_no_more_than_another_run_does() -> None:
    """The sleeping run is as near to a run without sleep as these are to each other."""
    plain = [weights_after(3, sleeps=False, repeatable=False) for _ in range(4)]
    slept = weights_after(3, sleeps=True, repeatable=False)
    widest = max(float((a - b).abs().max()) for a, b in itertools.combinations(plain, 2))
    assert min(float((slept - other).abs().max()) for other in plain) <= widest
