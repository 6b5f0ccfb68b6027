"""What vLLM may take of a GPU that it shares with a learner that sleeps meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrlhf.cluster.parts import placement_plan, specs
from asyncrlhf.cluster.placement import first_turn
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.engines.vllm.core import engine_arguments
from asyncrlhf.engines.vllm.memory_share import CONTEXT_BYTES, memory_share, weight_bytes, with_share
from asyncrlhf.errors import ConfigError

GB = 10**9
VLLM = GeneratorConfig(engine="vllm", gpus=1)


@pytest.mark.parametrize("beside", [0, 16 * GB, 40 * GB])
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_learner_and_engines_fit_together_and_leave_little(beside: int, part: float) -> None:
    total = 80 * GB
    share = memory_share("generator-0", total, total, beside, 2 * GB, part)
    rest = total - share / part * total - beside - CONTEXT_BYTES
    assert 0.02 * total <= rest <= 0.05 * total


def test_what_others_hold_now_is_not_promised_to_vllm() -> None:
    assert memory_share("g", 80 * GB, 40 * GB, 0, GB) <= 0.5


def test_weights_that_do_not_fit_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^generator-0 takes .* keeps 66\.6 of 80\.0 GB .* weights of 16\.0 GB"):
        memory_share("generator-0", 80 * GB, 80 * GB, 65 * GB, 16 * GB)


def test_the_share_reaches_vllm_unless_the_user_has_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GB, 80 * GB))
    derived = engine_arguments(with_share(VLLM, ModelConfig(), "g", 30 * GB), ModelConfig())["gpu_memory_utilization"]
    assert derived == memory_share("g", 80 * GB, 70 * GB, 30 * GB, 1) and 0.5 < derived < 0.65
    own = GeneratorConfig(engine="vllm", gpus=1, vllm=VllmConfig(gpu_memory_utilization=0.3))
    assert with_share(own, ModelConfig(), "g", 30 * GB) is own
    assert engine_arguments(VLLM, ModelConfig())["gpu_memory_utilization"] == 0.9


def test_weights_are_counted_once_and_dealt_out_over_the_workers() -> None:
    two = GeneratorConfig(engine="vllm", gpus=2, vllm=VllmConfig(tensor_parallel_size=2, dtype="float32"))
    assert weight_bytes(two, ModelConfig()) == 2 * 658_944


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_start_behind_a_sleeping_learner_and_know_what_it_keeps(ranks: int) -> None:
    gpus = 1 / ranks
    settings = ["cluster=flatten", "generator.engine=vllm", "generator.gpus=1", "generator.vllm.sleep_level=2"]
    config = load_config([*settings, f"learner.gpus={gpus}", f"learner.ranks={ranks}", "batch_size=64"])
    plan, wanted = placement_plan(config), specs(config, config.weights)
    assert wanted.learner.offloads and plan.crowd == ranks
    asked: list[str] = []

    async def every(seconds: float, method: Any) -> list[int]:
        asked.append(method.__qualname__)
        return [5 * GB] * ranks

    learner: Any = SimpleNamespace(every=every)
    found = asyncio.run(first_turn(learner, wanted, plan.sharing, plan.crowd))
    assert asked == ["LearnerWorker.sleep"]
    assert [spec.beside_bytes for spec in found.generators] == [ranks * 5 * GB]
    assert [spec.beside_bytes for spec in wanted.generators] == [0]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["cluster.offload=true"], "cluster.placement=auto they do not"),
        (
            ["cluster=flatten", "cluster.offload=true", "learner.backend=deepspeed"],
            "not work with learner.backend",
        ),
        (["cluster=flatten", "cluster.offload=true", "generator.engine=vllm"], "no sleep mode"),
        (
            ["cluster=flatten", "cluster.offload=false", "generator.engine=vllm", "generator.gpus=1", "learner.gpus=1"],
            "set generator.vllm.gpu_memory_utilization",
        ),
        (["generator.vllm.sleep_level=3"], "generator.vllm.sleep_level=3 is out of range"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(overrides)
