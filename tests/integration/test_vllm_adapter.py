"""A LoRA adapter that vLLM applies itself: log-probs after loads in flight, tags, caches, refusals, a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import LoraConfig, ModelConfig
from asyncrlhf.engines.engine import CacheMode, named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.engines.vllm import core as vllm_core
from asyncrlhf.engines.vllm.adapter import check_applied
from asyncrlhf.engines.vllm.core import engine_arguments
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.models.adapter import add_adapter, trained_tensors
from tests.loop import run as local_run
from tests.numeric import assert_close
from tests.vllm_tiny import PROBE, TinyVllm, finish, needs_vllm, own_logprobs, requests, tiny_model

pytestmark = needs_vllm

LORA = LoraConfig(r=2, alpha=3, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
# Float32 rounding of both sides, with adapters of noise that make the weights several times as large.
AGREE = 1e-3


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyVllm]:
    running = TinyVllm(tmp_path_factory.mktemp("tiny"), tied=request.param, lora=LORA)
    yield running
    running.close()


class Policy:
    """The tiny model with an adapter, by transformers and PEFT; a version's adapter is noise of its seed."""

    def __init__(self, tiny: TinyVllm) -> None:
        self.model = add_adapter(tiny_model(tied=tiny.model.config.tie_word_embeddings), LORA)
        self.adapter = trained_tensors(self.model)

    def version(self, version: int) -> dict[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(version)
        for tensor in self.adapter.values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=noise) if version else torch.zeros(tensor.shape))
        return {name: tensor.clone() for name, tensor in self.adapter.items()}

    @torch.no_grad()
    def logprobs(self, text: np.ndarray) -> np.ndarray:
        return own_logprobs(self.model(torch.from_numpy(text)[None]).logits[0], text)


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.thorough_but("untied")
def test_each_load_in_flight_leaves_the_adapted_model_and_the_base_as_it_was(tiny: TinyVllm) -> None:
    """Twelve adapters one after the other, with sequences under way: the newest one alone is applied."""
    engine, policy = tiny.engine(6), Policy(tiny)
    engine.load_weights(0, policy.version(0), "recompute")
    base = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    assert base.keys() == named_weights(tiny.model).keys()
    before = [policy.logprobs(text) for text in PROBE]
    engine.submit(requests(6, 60))
    for version in range(1, 13):
        engine.step(0.0)
        engine.load_weights(version, policy.version(version), "keep")
        assert len(engine.in_flight()) == 6
        for got, text, without in zip(engine.score(PROBE), PROBE, before, strict=True):
            own = policy.logprobs(text)
            assert_close(got, own, atol=AGREE)
            assert np.abs(without - own).max() > 0.1
    for name, tensor in engine.parameters().items():
        assert torch.equal(tensor, base[name]), name
    assert {tuple(np.unique(r.policy_versions)) for r in finish(engine).values()} == {tuple(range(13))}


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_a_tag_names_the_adapter_that_made_the_token(tiny: TinyVllm, cache: CacheMode) -> None:
    """With a recomputed cache every token's log-prob is that under the adapter of its tag, also in a request that
    started before the first adapter; with a kept cache only those of the first version, and of requests that start
    afterwards."""
    engine, policy = tiny.engine(4), Policy(tiny)
    engine.load_weights(0, policy.version(0), "recompute")
    asked = requests(4, 40)
    engine.submit(asked)
    for version in (1, 2):
        for _ in range(10):
            engine.step(0.0)
        engine.load_weights(version, policy.version(version), cache)
    later = requests(2, 20, first=10)
    done = finish(engine)
    engine.submit(later)
    done |= finish(engine)
    for request in (*asked, *later):
        result = done[request.rollout_id]
        text, start = np.concatenate([request.prompt_ids, result.response_ids]), len(request.prompt_ids) - 1
        apart = []
        for version in range(3):
            policy.version(version)
            apart.append(np.abs(policy.logprobs(text)[start:] - result.behavior_logprobs))
        own = np.choose(result.policy_versions, np.stack(apart))
        whole = cache == "recompute" or request in later
        assert (own if whole else own[result.policy_versions == 0]).max() < AGREE
        assert set(result.policy_versions.tolist()) == ({2} if request in later else {0, 1, 2})
        former = apart[1][result.policy_versions == 2]
        assert former.max() > 0.1, "the adapter before would do as well"


def test_what_slept_wakes_with_its_adapter(tiny: TinyVllm) -> None:
    engine, policy = tiny.engine(2), Policy(tiny)
    engine.load_weights(3, policy.version(3), "keep")
    engine.sleep(keep_weights=False)
    engine.wake()
    assert_close(engine.score(PROBE)[0], policy.logprobs(PROBE[0]), atol=AGREE)


def test_whole_weights_replace_base_and_adapter(tiny: TinyVllm) -> None:
    engine, policy = tiny.engine(2), Policy(tiny)
    engine.load_weights(1, policy.version(1), "keep")
    engine.submit(requests(2, 20))
    engine.step(0.0)
    engine.load_weights(2, named_weights(tiny.model), "recompute")
    policy.version(0)
    assert_close(engine.score(PROBE)[0], policy.logprobs(PROBE[0]), atol=AGREE)
    for result in finish(engine).values():
        text = np.concatenate([result.prompt.token_ids, result.response_ids])
        own = policy.logprobs(text)[len(result.prompt.token_ids) - 1 :]
        assert np.abs(own - result.behavior_logprobs)[result.policy_versions == 2].max() < AGREE


def test_an_adapter_that_does_not_fit_is_named_and_leaves_nothing(
    tiny: TinyVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves out the tensors of layers that it does not adapt; a rank above its limit it refuses itself."""
    engine, policy = tiny.engine(2), Policy(tiny)
    engine.load_weights(1, policy.version(1), "keep")
    right = policy.version(2)
    name = next(iter(right))
    wrong = {
        f"missing: {name}": {n: t for n, t in right.items() if n != name},
        "unknown: strange.lora_A.default.weight": right | {"strange.lora_A.default.weight": torch.zeros(2, 2)},
        rf"wrong shape: {name} is \(5, 32\) instead of \(2, 32\)": right | {name: torch.zeros(5, 32)},
    }
    for said, tensors in wrong.items():
        with pytest.raises(WeightSyncError, match=f"adapter of version 2 is not that of model.lora: {said}"):
            engine.load_weights(2, tensors, "keep")
    monkeypatch.setattr(vllm_core.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(tiny.core, "_lora", LoraConfig(r=64))
    with pytest.raises(WeightSyncError, match=r"did not load the adapter of version 2: .*enable_lora=false merges"):
        engine.load_weights(2, right, "keep")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    engine.load_weights(3, policy.version(3), "keep")
    assert_close(engine.score(PROBE)[0], policy.logprobs(PROBE[0]), atol=AGREE)


def test_a_layer_that_vllm_leaves_out_is_named() -> None:
    check_applied([["a.q_proj"], ["b.q_proj"]])  # the stages of a pipeline, each without the other's layers
    with pytest.raises(ConfigError, match=r"does not apply the adapter of model.lora to lm_head; allowed: other"):
        check_applied([["a.q_proj", "lm_head"], ["lm_head"]])


def test_an_engine_whose_vllm_leaves_a_layer_out_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = engine_arguments

    def fewer(*given: Any) -> dict[str, Any]:
        found = arguments(*given)
        return found | {"lora_target_modules": [n for n in found["lora_target_modules"] if n != "o_proj"]}

    monkeypatch.setattr(vllm_core, "engine_arguments", fewer)
    with pytest.raises(
        ConfigError, match=r"does not apply the adapter of model.lora to model.layers.0.self_attn.o_proj"
    ):
        TinyVllm(tmp_path, lora=LORA)


def test_who_applies_the_adapter_depends_on_the_device_unless_it_is_said() -> None:
    model = ModelConfig(lora=LoraConfig(r=12))
    for gpus, said, applied in ((0, None, False), (1, None, True), (0, True, True), (1, False, False)):
        config = GeneratorConfig(engine="vllm", gpus=gpus, vllm=VllmConfig(enable_lora=said))
        arguments = engine_arguments(config, model)
        assert arguments.get("enable_lora", False) is applied, (gpus, said)
        assert arguments.get("max_lora_rank") == (16 if applied else None)
        if applied:
            assert arguments["lora_target_modules"] == [
                "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
            ]  # fmt: skip
    assert "enable_lora" not in engine_arguments(GeneratorConfig(engine="vllm", gpus=1), ModelConfig())
    own = GeneratorConfig(engine="vllm", gpus=1)
    with pytest.raises(ConfigError, match=r"model\.lora\.r=600 is above vLLM's largest rank .*at most 512, or"):
        engine_arguments(own, ModelConfig(lora=LoraConfig(r=600)))


@pytest.mark.more
@pytest.mark.in_turn
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_run_whose_generators_apply_the_adapter(tmp_path: Path, workers: int) -> None:
    done = local_run(
        tmp_path, "generator.engine=vllm", "generator.vllm.enable_lora=true", "generator.vllm.kv_cache_gb=0.1",
        f"generator.vllm.tensor_parallel_size={workers}", "generator.slots=16", "batch_size=16", "num_generations=4",
        "steps=6", "model.lora.r=8", "weights.audit_every=1", "weights.audit_tolerance=1e-4",
        "learner.learning_rate=1e-3",
    )  # fmt: skip
    done.assert_ledger_whole()
    # Every publish was audited: engine and learner agree on the log-probs of the probe.
    assert all(abs(row["mismatch_kl"]) < 1e-8 for row in done.metrics)
    assert max(max(versions) for versions in done.trained.policy_versions) >= 3
