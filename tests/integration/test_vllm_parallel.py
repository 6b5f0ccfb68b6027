"""A replica of two tensor parallel vLLM workers inside a Ray actor: it computes what one model does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch

import asyncrlhf
from asyncrlhf.actors.generator import GeneratorActor
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams
from tests.numeric import assert_close
from tests.ray_run import is_alive, wait_until
from tests.vllm_tiny import needs_vllm

pytestmark = needs_vllm

TEXT = np.random.default_rng(0).integers(3, 15, 40)
LOOKS = 60


def entry_points(folder: Path) -> Path:
    """What an installed package has: vLLM's worker processes find our weight transfer by it."""
    info = folder / "asyncrlhf_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asyncrlhf-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nasyncrlhf_test = asyncrlhf.engines.vllm.transfer:register\n"
    )
    return folder


@torch.no_grad()
def reference(model: torch.nn.Module, text: np.ndarray) -> np.ndarray:
    logits = model(torch.from_numpy(text)[None]).logits[0]
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(text)[1:, None])[:, 0].numpy()


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
def test_two_workers_in_a_ray_actor_compute_what_one_model_does(tmp_path: Path) -> None:
    model = load_model(ModelConfig())
    own = VllmConfig(engine_kwargs={"block_size": 32}, kv_cache_gb=0.05, max_model_len=128, tensor_parallel_size=2)
    config = GeneratorConfig(engine="vllm", slots=4, threads=0, vllm=own)
    weights = WeightsConfig(transport="object_store")
    spec = GeneratorSpec("generator-0", config, ModelConfig(), "ray", weights)
    sources = Path(asyncrlhf.__file__).parents[1]
    paths = f"{entry_points(tmp_path)}:{sources}"
    options = {"num_cpus": 0, "max_concurrency": 8, "runtime_env": {"env_vars": {"PYTHONPATH": paths}}}
    actor = ray.remote(GeneratorActor).options(**options).remote(spec)
    assert ray.get(actor.ready.remote(), timeout=120)
    assert_close(ray.get(actor.call.remote("score", [TEXT]))[0], reference(model, TEXT), atol=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sender = build_sender(weights, "ray", named_weights(model))
    sender.connect("", ["generator-0"], 1)
    sender.snapshot(1, named_weights(model))
    ticket = sender.ticket()
    sender.transfer(ticket)
    ray.get(actor.call.remote("receive", ticket))
    ray.get(actor.call.remote("load", 1, "recompute"))
    assert_close(ray.get(actor.call.remote("score", [TEXT]))[0], reference(model, TEXT), atol=1e-4)
    prompt = Prompt("p", "", TEXT[:5])
    sampling = SamplingParams(max_completion_length=12)
    items = [GenerationRequest(i, i, prompt, i, sampling) for i in range(6)]
    ray.get(actor.call.remote("submit", items))
    done: list[Rollout] = []
    for _ in range(LOOKS):
        done += ray.get(actor.collect.options(num_returns=2).remote()[1])
        if len(done) == len(items):
            break
    assert len(done) == len(items), "not all requests came back"
    for rollout in done:
        own_logprobs = reference(model, np.concatenate([TEXT[:5], rollout.response_ids]))[4:]
        assert_close(rollout.behavior_logprobs, own_logprobs, atol=1e-4)
        assert set(rollout.policy_versions) == {1}
    ray.get(actor.close.remote())
    ray.kill(actor)
    sender.close()


ALONE = """
import signal
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.engines.vllm.core import VllmCore

own = VllmConfig(engine_kwargs={"block_size": 32}, kv_cache_gb=0.05, max_model_len=128, tensor_parallel_size=2)
core = VllmCore(GeneratorConfig(engine="vllm", slots=4, threads=0, vllm=own), ModelConfig())
print("stands", flush=True)
signal.pause()
"""


@pytest.mark.thorough
def test_workers_end_with_a_replica_that_is_killed(tmp_path: Path) -> None:
    """Without a Ray that ends process groups, as in a cluster that was started without it; one of them is frozen."""
    paths = f"{entry_points(tmp_path)}:{Path(asyncrlhf.__file__).parents[1]}"
    command, env = [sys.executable, "-c", ALONE], {**os.environ, "PYTHONPATH": paths}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    started: list[psutil.Process] = []
    try:
        assert parent.stdout is not None and "stands\n" in iter(parent.stdout.readline, "")
        started = psutil.Process(parent.pid).children(recursive=True)
        workers = [process for process in started if "VLLM::Worker" in " ".join(process.cmdline())]
        assert len(workers) == 2, [process.cmdline() for process in started]
        workers[0].suspend()
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(is_alive, started)), "the end of what the replica started", 20.0)
    finally:
        for process in filter(is_alive, [psutil.Process(parent.pid)] if parent.poll() is None else started):
            process.kill()
