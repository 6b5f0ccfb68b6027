"""The vllm engine's parts that need no vLLM: settings, workers' shares, chunks of an update, tags of late batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.generator_config import OWN_ENGINE, GeneratorConfig, VllmConfig
from asyncrlhf.engines.vllm import core as vllm_core
from asyncrlhf.engines.vllm.core import VllmCore, engine_arguments, sampling_arguments
from asyncrlhf.engines.vllm.transfer import merge_shares
from asyncrlhf.engines.vllm.vllm_engine import VllmEngine, _Draft
from asyncrlhf.engines.vllm_keywords import check_known
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams


def told_experts(inputs: int) -> np.ndarray:
    """[inputs, layers, chosen] as vLLM tells them at the end of a response."""
    return np.arange(inputs * 6, dtype=np.uint8).reshape(inputs, 3, 2)


class LateCore:
    """A vLLM whose batches come out two steps after they were sampled, as with asynchronous scheduling on GPUs. Each
    token it samples is the version of the weights that sampled it."""

    context, folder, trust_remote_code, adapts = 128, resolve("tiny"), False, False
    routes = False
    drain = VllmCore.drain

    def __init__(self) -> None:
        self.batch_queue: deque[list[Any]] = deque()
        self._left: dict[str, int] = {}
        self._inputs: dict[str, int] = {}  # tokens whose experts are told at the end: all but the last
        self._weights, self._paused = 0, False
        self.calls: list[str] = []  # of sleep and wake
        self._llm = SimpleNamespace(engine_core=SimpleNamespace(engine_core=self))

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self._paused = True

    def resume_scheduler(self) -> None:
        self._paused = False

    def generate(self, request: GenerationRequest, salt: str) -> None:
        name, length = str(request.rollout_id), request.sampling.max_completion_length
        self._left[name], self._inputs[name] = length, len(request.prompt_ids) + length - 1

    def score(self, name: str, text: Any) -> None:
        token = SimpleNamespace(logprob=-1.0)
        entries = [None, *({int(i): token} for i in text[1:])]
        output = SimpleNamespace(request_id=name, prompt_token_ids=text.tolist(), prompt_logprobs=entries)
        self.batch_queue.appendleft([output])

    def step(self) -> list[Any]:
        if self._left and not self._paused:
            self.batch_queue.appendleft([self._sample(name) for name in list(self._left)])
            if len(self.batch_queue) < 3:
                return []
        return self.batch_queue.pop() if self.batch_queue else []

    def _sample(self, name: str) -> Any:
        self._left[name] -= 1
        finished = self._left[name] == 0
        if finished:
            del self._left[name]
        made = SimpleNamespace(
            token_ids=[self._weights],
            logprobs=[{self._weights: SimpleNamespace(logprob=-0.5)}],
            finish_reason="length" if finished else None,
            routed_experts=told_experts(self._inputs[name]) if finished and self.routes else None,
        )
        return SimpleNamespace(request_id=name, finished=finished, outputs=[made])

    def abort(self, names: list[str]) -> None:
        for name in names:
            del self._left[name]

    def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not self.batch_queue, "the weights change under batches on their way"
        self._weights = version

    def forget_cache(self, *, running: bool) -> None:
        assert not running

    def sleep(self, *, keep_weights: bool = True) -> bool:
        assert not self.batch_queue, "asleep with batches on their way"
        self.calls.append("sleep")
        if not keep_weights:
            self._weights = -1  # at level 2
        return keep_weights

    def wake(self, *, weights_only: bool = False) -> None:
        self.calls.append("weights" if weights_only else "all")


def test_a_sleeper_drains_first_and_brings_back_what_a_call_needs() -> None:
    core = LateCore()
    engine = VllmEngine(core, slots=4)  # type: ignore[arg-type]
    weights = {name: torch.zeros(p.shape) for name, p in engine._skeleton.named_parameters()}
    sampling = SamplingParams(max_completion_length=9)
    engine.submit([GenerationRequest(i, 0, Prompt("", "", np.array([3, 4])), i, sampling) for i in range(2)])
    for _ in range(4):
        engine.step(0.0)
    assert core.batch_queue
    engine.sleep()
    engine.load_weights(1, weights, "keep")
    engine.score([np.arange(4)])
    assert core.calls == ["sleep", "weights", "sleep", "all", "sleep"]
    engine.wake()
    done: list[Any] = []
    while engine.in_flight():
        done += engine.step(0.0).finished
    assert core.calls[-1] == "all" and len(core.calls) == 6
    for result in done:
        assert set(result.policy_versions.tolist()) == {0, 1}
        np.testing.assert_array_equal(result.response_ids, result.policy_versions)


def test_an_engine_that_forgot_its_weights_samples_nothing_before_the_next_load() -> None:
    core = LateCore()
    engine = VllmEngine(core, slots=4)  # type: ignore[arg-type]
    weights = {name: torch.zeros(p.shape) for name, p in engine._skeleton.named_parameters()}
    sampling = SamplingParams(max_completion_length=9)
    engine.submit([GenerationRequest(i, 0, Prompt("", "", np.array([3, 4])), i, sampling) for i in range(2)])
    done: list[Any] = []
    for _ in range(4):
        done += engine.step(0.0).finished
    engine.sleep(keep_weights=False)
    engine.wake()
    assert engine.torn
    for _ in range(3):
        done += engine.step(0.0).finished
    engine.load_weights(1, weights, "keep")
    while engine.in_flight():
        done += engine.step(0.0).finished
    for result in done:
        assert set(result.policy_versions.tolist()) == {0, 1}
        np.testing.assert_array_equal(result.response_ids, result.policy_versions)


@pytest.mark.parametrize(("level", "keep", "asked"), [(1, True, 1), (1, False, 1), (2, True, 1), (2, False, 2)])
def test_weights_are_forgotten_only_where_new_ones_follow(level: int, keep: bool, asked: int) -> None:
    levels: list[int] = []
    llm = SimpleNamespace(sleep=lambda level, mode: levels.append(level))
    core: Any = SimpleNamespace(can_sleep=True, _sleep_level=level, _llm=llm, adapts=False)
    assert VllmCore.sleep(core, keep_weights=keep) == (asked == 1)
    assert levels == [asked]
    core.adapts = True
    assert VllmCore.sleep(core, keep_weights=keep) and levels[1:] == [1], "an adapter brings no base weights back"


def test_tags_are_right_when_batches_come_late() -> None:
    engine = VllmEngine(LateCore(), slots=4)  # type: ignore[arg-type]
    weights = {name: torch.zeros(p.shape) for name, p in engine._skeleton.named_parameters()}
    sampling = SamplingParams(max_completion_length=14)
    engine.submit([GenerationRequest(i, 0, Prompt("", "", np.array([3, 4])), i, sampling) for i in range(6)])
    done: list[Any] = []
    for version in range(1, 40):
        for _ in range(version % 4):
            done += engine.step(0.0).finished
        if version < 9:
            engine.load_weights(version, weights, "keep")
    assert sorted(result.rollout_id for result in done) == list(range(6))
    for result in done:
        assert isinstance(result, Rollout) and len(result.response_ids) == 14
        np.testing.assert_array_equal(result.response_ids, result.policy_versions)
    assert any(len(set(result.policy_versions.tolist())) > 2 for result in done)


def test_the_experts_told_at_the_end_are_the_rollouts() -> None:
    core = LateCore()
    core.routes = True
    engine = VllmEngine(core, slots=4)  # type: ignore[arg-type]
    sampling = SamplingParams(max_completion_length=5)
    engine.submit([GenerationRequest(i, 0, Prompt("", "", np.array([3, 4])), i, sampling) for i in range(2)])
    done: list[Any] = []
    while engine.in_flight():
        done += engine.step(0.0).finished
    for result in done:
        assert np.array_equal(result.routed_experts, told_experts(2 + 5 - 1).reshape(6, 6))
        assert result.routed_experts.dtype == np.uint8


def test_shares_of_tensor_parallel_workers_become_whole_tensors() -> None:
    whole = {"columns": torch.randn(6, 4), "rows": torch.randn(4, 6), "norm": torch.randn(5), "last": torch.randn(3)}
    first, second = (
        {"columns": (whole["columns"][half], 0), "rows": (whole["rows"][:, half], 1), "norm": (whole["norm"], None)}
        for half in (slice(0, 3), slice(3, 6))
    )
    merged = merge_shares([first, {**second, "last": (whole["last"], None)}])  # a pipeline stage alone holds `last`
    assert list(merged) == ["columns", "rows", "norm", "last"]
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=0)


def test_chunks_hold_every_tensor_once_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_core, "CHUNK_BYTES", 100)
    tensors = {str(i): torch.zeros(size) for i, size in enumerate((10, 10, 10, 40, 5, 5))}  # 4 bytes an element
    chunks = vllm_core._chunks(tensors)
    assert [list(chunk) for chunk in chunks] == [["0", "1"], ["2"], ["3"], ["4", "5"]]


def test_settings_reach_vllm_under_its_names() -> None:
    own = VllmConfig(dtype="bfloat16", max_model_len=96, engine_kwargs={"block_size": 32}, tensor_parallel_size=2)
    arguments = engine_arguments(GeneratorConfig(engine="vllm", slots=16, gpus=2, vllm=own), ModelConfig())
    expected = {
        "dtype": "bfloat16", "max_model_len": 96, "block_size": 32, "enable_prefix_caching": True,
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "distributed_executor_backend": "mp",
        "max_num_seqs": 20, "enforce_eager": False, "logprobs_mode": "processed_logprobs",
        "enable_chunked_prefill": None,
    }  # fmt: skip
    assert {key: arguments[key] for key in expected} == expected
    assert "kv_cache_memory_bytes" not in arguments


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [({}, 0), ({"top_k": 20}, 28), ({"top_k": 128}, 136), ({"top_k": 129}, 0), ({"top_k": 20, "top_p": 0.9}, 0),
     ({"top_k": 20, "min_p": 0.1}, 0), ({"min_p": 0.1}, 0), ({"top_k": 20, "temperature": 0.0}, 0)],
)  # fmt: skip
def test_vllm_is_asked_for_what_names_the_kept_set(sampling: dict[str, float], asked: int) -> None:
    request = GenerationRequest(0, 0, Prompt("", "", np.array([1])), 0, SamplingParams(4, **sampling))  # type: ignore[arg-type]
    arguments = sampling_arguments(request, 1000)
    assert arguments["logprobs"] == asked and arguments["min_p"] == request.sampling.min_p
    assert sampling_arguments(request, 24)["logprobs"] == min(asked, 24)
    assert asked <= engine_arguments(GeneratorConfig(engine="vllm"), ModelConfig())["max_logprobs"]


def test_more_ties_than_were_asked_for_are_left_out_of_mu() -> None:
    """What vLLM gave is the set, and mu is renormalised on it; what has no probability is not in it."""
    draft = _Draft(GenerationRequest(0, 0, Prompt("", "", np.array([1])), 0, SamplingParams(4, top_k=2)))
    entry = {i: SimpleNamespace(logprob=math.log(0.25) if i < 7 else -math.inf) for i in (5, 6, 4, 9)}
    draft.take([6], [entry], 3)
    assert draft.kept[0].tolist() == [5, 6, 4] and draft.versions == [3]
    assert draft.logprobs[0] == pytest.approx(math.log(1 / 3), abs=1e-12)


def test_who_runs_several_workers_depends_on_where_the_replica_was_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = VllmConfig(tensor_parallel_size=2)
    config = GeneratorConfig(engine="vllm", gpus=2, vllm=own)
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "0,1")
    assert engine_arguments(config, ModelConfig())["distributed_executor_backend"] == "ray"
    one = GeneratorConfig(engine="vllm", gpus=1)
    assert engine_arguments(one, ModelConfig())["distributed_executor_backend"] == "uni"
    monkeypatch.delenv("VLLM_RAY_BUNDLE_INDICES")
    assert engine_arguments(config, ModelConfig())["distributed_executor_backend"] == "mp"


def test_a_cpu_replica_has_room_for_all_slots_at_full_length() -> None:
    arguments = engine_arguments(
        GeneratorConfig(engine="vllm", slots=3, vllm=VllmConfig(engine_kwargs={"block_size": 32})), ModelConfig()
    )
    assert arguments["enforce_eager"] and arguments["enable_chunked_prefill"] is False
    assert arguments["distributed_executor_backend"] == "uni"
    # Keys and values, 4 layers, 4 heads of 32, float32, 128 tokens; 5 sequences more are scored or spare.
    assert arguments["kv_cache_memory_bytes"] == 2 * 4 * 4 * 32 * 4 * 128 * (3 + 5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpus": 1.0, "vllm": VllmConfig(tensor_parallel_size=2)}, "generator.gpus=1 is not the 2 "),
        ({"gpus": 4.0}, "generator.gpus=4 is not the 1 "),
        ({"vllm": VllmConfig(sleep_level=1)}, "sleep_level=1 needs generator.gpus"),
        ({"vllm": VllmConfig(pipeline_parallel_size=2)}, "pipeline_parallel_size=2 needs generator.gpus"),
    ],
)
def test_devices_that_do_not_fit_the_workers_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GeneratorConfig(engine="vllm", **settings)


def test_half_a_gpu_is_a_device() -> None:
    GeneratorConfig(engine="vllm", gpus=0.5)
    with pytest.raises(ConfigError, match=r"generator\.vllm\.dtype"):
        VllmConfig(dtype="float8")


PASSED: dict[str, object] = {
    "quantization": "fp8", "kv_cache_dtype": "fp8", "cudagraph_capture_sizes": [1, 8], "max_num_scheduled_tokens": 256,
    "long_prefill_token_threshold": 64, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "async_scheduling": True, "attention_backend": "FLASH_ATTN", "enable_eplb": True,
    "decode_context_parallel_size": 2, "compilation_config": {"mode": 3}, "moe_backend": "triton", "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED)
def test_an_engine_option_passes_through(name: str) -> None:
    own = VllmConfig(engine_kwargs={name: PASSED[name]})
    assert engine_arguments(GeneratorConfig(engine="vllm", vllm=own), ModelConfig())[name] == PASSED[name]


REFUSED = (
    "stream_interval", "diffusion_config", "kv_transfer_config", "ec_transfer_config", "logits_processors",
    "watermark_config", "scheduler_cls", "worker_cls", "runner", "convert", "hf_overrides", "hf_config_path",
    "model_weights", "model_class_overrides", "revision", "nnodes", "node_rank", "master_addr", "master_port",
    "prefill_context_parallel_size", "enable_elastic_ep", "data_parallel_size", "data_parallel_rank",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_engine_option_that_breaks_stamps_or_the_one_model_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^generator\.vllm\.engine_kwargs\.{name} is not allowed: it \w.+\.$"):
        VllmConfig(engine_kwargs={name: 2})
    if find_spec("vllm") is not None:
        check_known("generator.vllm.engine_kwargs", [name], "EngineArgs")  # or the refusal refuses nothing


def test_more_keywords_of_vllm_pass_through_and_those_with_settings_do_not() -> None:
    own = VllmConfig(engine_kwargs={"model_impl": "transformers"})
    config = GeneratorConfig(engine="vllm", vllm=own, generation_kwargs={"frequency_penalty": 0.5})
    assert engine_arguments(config, ModelConfig())["model_impl"] == "transformers"
    assert not engine_arguments(config, ModelConfig())["enable_return_routed_experts"]
    assert engine_arguments(config, ModelConfig(), routes=True)["enable_return_routed_experts"]
    for name in ("max_num_seqs", "enable_return_routed_experts"):
        with pytest.raises(ConfigError, match=rf"engine_kwargs.{name} has its own setting"):
            VllmConfig(engine_kwargs={name: 3})
    own = {*engine_arguments(GeneratorConfig(engine="vllm"), ModelConfig())}
    assert own - {*OWN_ENGINE} == {"load_format", "enforce_eager", "enable_prefix_caching"}, "defaults"
    with pytest.raises(ConfigError, match=r"generation_kwargs.top_p has its own setting"):
        GeneratorConfig(engine="vllm", generation_kwargs={"top_p": 0.5})
    if find_spec("vllm") is not None:
        with pytest.raises(
            ConfigError, match=r"modle_impl is not a field of the .* EngineArgs \(did you mean model_impl"
        ):
            VllmConfig(engine_kwargs={"modle_impl": "transformers"})
        with pytest.raises(ConfigError, match=r"generation_kwargs.frequency is not a field of the .* SamplingParams"):
            GeneratorConfig(engine="vllm", generation_kwargs={"frequency": 0.5})
    with pytest.raises(ConfigError, match=r"generation_kwargs=.* are for vLLM; generator.engine=hf samples only by"):
        GeneratorConfig(generation_kwargs={"num_beams": 2})
    with pytest.raises(ConfigError, match=r"generator.stop and generator.repetition_penalty need a model"):
        GeneratorConfig(engine="fake", stop=["x"])
