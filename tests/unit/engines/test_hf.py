"""The hf engine against plain transformers: forward passes, ``generate``, weight updates, architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from asyncrlhf.engines.hf import slots as table
from asyncrlhf.engines.hf.forward import is_lean
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.errors import WeightSyncError
from asyncrlhf.types import GenerationFailure, GenerationRequest, Prompt, Rollout, SamplingParams
from tests.numeric import FLOAT32, assert_close

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 160,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": ("Llama", GROUPED | {"tie_word_embeddings": True}),
    "llama_multi_head": ("Llama", {"num_key_value_heads": 6}),
    "llama_bias_rope": (
        "Llama",
        GROUPED
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        },
    ),
    "llama_dynamic_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "qwen2": ("Qwen2", GROUPED),
    "mistral": ("Mistral", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 160}),
}
LEAN = {"llama", "llama_multi_head", "llama_bias_rope", "qwen2", "mistral"}


def make_model(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    architecture, extra = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**(SIZES | extra))
    prefix = "GPT2LMHead" if architecture == "GPT2" else f"{architecture}For"
    return getattr(transformers, f"{prefix}Model" if architecture == "GPT2" else f"{prefix}CausalLM")(config).eval()


def make_requests(sampling: SamplingParams, lengths: list[int], siblings: int = 1) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    prompts = [Prompt("", "", rng.integers(1, VOCABULARY, length)) for length in lengths]
    return [
        GenerationRequest(i, i // siblings, prompts[i // siblings], 77 + i, sampling)
        for i in range(siblings * len(prompts))
    ]


def run(engine: HFEngine, requests: list[GenerationRequest] | None = None) -> dict[int, Rollout]:
    engine.submit(requests or [])
    done: dict[int, Rollout] = {}
    while engine.in_flight():
        for result in engine.step(0.0).finished:
            assert isinstance(result, Rollout), result
            done[result.rollout_id] = result
    return done


@torch.no_grad()
def reference_logits(model: PreTrainedModel, request: GenerationRequest, result: Rollout) -> torch.Tensor:
    """Logits [L, V] of the response's tokens by one plain forward pass over the whole text, alone."""
    text = torch.from_numpy(np.concatenate([request.prompt_ids, result.response_ids]))
    return model(text[None]).logits[0, len(request.prompt_ids) - 1 : -1]


def picked(logits: torch.Tensor, result: Rollout) -> np.ndarray:
    return logits.log_softmax(-1).gather(1, torch.from_numpy(result.response_ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.more_but(every=2)
def test_behavior_logprobs_equal_a_plain_forward_pass(name: str) -> None:
    sampling = SamplingParams(14, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=(5, 6))
    requests = make_requests(sampling, [3, 1, 9, 40, 2, 17, 90, 4, 6], siblings=3)
    model = make_model(name)
    assert is_lean(model) == (name in LEAN)
    done = run(HFEngine(model, slots=5), requests)
    plain = make_model(name)
    warpers = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9))
    for request in requests:
        result = done[request.rollout_id]
        logits = reference_logits(plain, request, result)
        for warper in warpers:
            logits = warper(None, logits)
        assert_close(result.behavior_logprobs, picked(logits, result), atol=FLOAT32)
        assert result.finish_reason == ("stop" if result.response_ids[-1] in (5, 6) else "length")


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_greedy_equals_generate(name: str) -> None:
    requests = make_requests(SamplingParams(20, temperature=0.0), [4, 1, 12, 30], siblings=2)
    done = run(HFEngine(make_model(name), slots=3), requests)
    plain = make_model(name)
    for request in requests:
        prompt = torch.from_numpy(request.prompt_ids)[None]
        expected = plain.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
        result = done[request.rollout_id]
        np.testing.assert_array_equal(result.response_ids, expected[0, prompt.shape[1] :].numpy())
        assert_close(result.behavior_logprobs, picked(reference_logits(plain, request, result), result), atol=FLOAT32)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("budget", [8192, 30])
def test_after_a_recompute_logprobs_are_those_of_the_new_weights(
    name: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small budget the new prefills spread over several steps, and no token is sampled before its own."""
    monkeypatch.setattr(table, "PREFILL_TOKENS", budget)
    requests = make_requests(SamplingParams(16), [3, 25, 8, 1, 12], siblings=2)
    engine, new = HFEngine(make_model(name), slots=6), make_model(name, seed=1)
    engine.submit(requests)
    done = {result.rollout_id: result for _ in range(6) for result in engine.step(0.0).finished}
    engine.load_weights(1, dict(new.named_parameters()), "recompute")
    done |= run(engine)
    assert check_versions(requests, done, {0: make_model(name), 1: new}) > 0


def check_versions(requests: list[GenerationRequest], done: dict[int, Rollout], models: dict[int, Any]) -> int:
    """Every token's log-prob is its own version's; returns how many sequences mix versions."""
    mixed = 0
    for request in requests:
        result = done[request.rollout_id]
        for version, model in models.items():
            mine = result.policy_versions == version
            expected = picked(reference_logits(model, request, result), result)
            assert_close(result.behavior_logprobs[mine], expected[mine], atol=FLOAT32)
        mixed += len(set(result.policy_versions.tolist())) > 1
    return mixed


def test_a_kept_cache_differs_from_the_new_weights_and_the_tags_say_so() -> None:
    requests = make_requests(SamplingParams(12), [5, 9])
    engine, old, new = HFEngine(make_model(), slots=2), make_model(), make_model(seed=1)
    engine.submit(requests)
    for _ in range(5):
        engine.step(0.0)
    engine.load_weights(1, dict(new.named_parameters()), "keep")
    done = run(engine)
    for request in requests:
        result = done[request.rollout_id]
        assert result.policy_versions.tolist() == [0] * 5 + [1] * 7
        before = picked(reference_logits(old, request, result), result)
        after = picked(reference_logits(new, request, result), result)
        assert_close(result.behavior_logprobs[:5], before[:5], atol=FLOAT32)
        assert np.abs(result.behavior_logprobs[5:] - after[5:]).max() > 1e-2


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_siblings_after_an_update_get_a_prefill_under_the_new_weights(cache: Any) -> None:
    """A prompt's shared keys and values must not outlive the weights that made them."""
    requests = make_requests(SamplingParams(4), [11], siblings=6)
    engine, new = HFEngine(make_model(), slots=2), make_model(seed=1)
    first = run(engine, requests[:3])
    engine.load_weights(1, dict(new.named_parameters()), cache)
    done = first | run(engine, requests[3:])
    assert check_versions(requests, done, {0: make_model(), 1: new}) == 0


def test_siblings_share_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(SamplingParams(6), [20, 15], siblings=4)
    engine = HFEngine(make_model(), slots=3)
    sizes: list[int] = []
    step = engine._passes.step

    def counted(table: Any, prefills: Any) -> torch.Tensor:
        sizes.append(sum(len(sequence) for sequence, _ in prefills))
        return step(table, prefills)

    monkeypatch.setattr(engine._passes, "step", counted)
    run(engine, requests)
    assert sum(sizes) == 19 + 14


def test_a_freed_slot_is_refilled_in_the_very_next_pass() -> None:
    """Rows of 1 to 12 tokens over 4 slots: no pass but the last ones runs with an empty slot."""
    requests = [
        GenerationRequest(i, i, Prompt("", "", np.array([3, 4])), i, SamplingParams(1 + (7 * i) % 12))
        for i in range(24)
    ]
    engine = HFEngine(make_model(), slots=4)
    engine.submit(requests)
    widths = []
    while engine.in_flight():
        queued = len(engine.in_flight())
        widths.append((engine.step(0.0).tokens, queued))
    assert all(tokens == min(4, queued) for tokens, queued in widths)
    assert sum(tokens for tokens, _ in widths) == sum(r.sampling.max_completion_length for r in requests)


def test_mixed_settings_share_a_batch() -> None:
    settings = [SamplingParams(8, temperature=t, top_p=p, top_k=k) for t, p, k in ((0, 1, 0), (1, 0.5, 0), (2, 1, 4))]
    rng = np.random.default_rng(3)
    requests = [GenerationRequest(i, i, Prompt("", "", rng.integers(1, 40, 5)), i, settings[i % 3]) for i in range(9)]
    together = run(HFEngine(make_model(), slots=9), requests)
    for request in requests:
        alone = run(HFEngine(make_model(), slots=1), [request])[request.rollout_id]
        np.testing.assert_array_equal(alone.response_ids, together[request.rollout_id].response_ids)


def test_prompts_that_do_not_fit_are_failures_with_a_sentence() -> None:
    engine = HFEngine(make_model(), slots=2)
    sampling = SamplingParams(100)
    prompts = [np.arange(1, 31), np.ones(61, np.int64), np.zeros(0, np.int64), np.array([VOCABULARY])]
    engine.submit([GenerationRequest(i, i, Prompt("", "", ids), i, sampling) for i, ids in enumerate(prompts)])
    results = {}
    while engine.in_flight():
        results |= {result.rollout_id: result for result in engine.step(0.0).finished}
    assert isinstance(results[0], Rollout)
    errors = [results[i].error for i in (1, 2, 3) if isinstance(results[i], GenerationFailure)]
    assert [("context of 160" in e, "empty" in e, "outside" in e) for e in errors] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_score_equals_a_plain_forward_pass_also_while_rows_are_in_flight(name: str) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(1, VOCABULARY, length) for length in (7, 2, 60, 7, 1, 33)]
    engine, plain = HFEngine(make_model(name), slots=3), make_model(name)
    requests = make_requests(SamplingParams(9), [4, 8, 2])
    engine.submit(requests)
    engine.step(0.0)
    for text, score in zip(texts, engine.score(texts), strict=True):
        with torch.no_grad():
            logprobs = plain(torch.from_numpy(text)[None]).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.from_numpy(text)[1:, None])[:, 0].numpy()
        assert_close(score, expected, atol=FLOAT32)
    assert check_versions(requests, run(engine), {0: plain}) == 0


def test_bfloat16_agrees_with_the_model_in_bfloat16() -> None:
    requests = make_requests(SamplingParams(10), [4, 9, 21])
    model, plain = make_model().to(torch.bfloat16), make_model().to(torch.bfloat16)
    for request, result in zip(requests, run(HFEngine(model, slots=3), requests).values(), strict=True):
        expected = picked(reference_logits(plain, request, result).float(), result)
        assert_close(np.abs(result.behavior_logprobs - expected).mean(), 0.0, atol=0.05)


def test_weights_must_fit_by_name_and_shape() -> None:
    engine = HFEngine(make_model(), slots=1)
    weights = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    norm = weights.pop("model.norm.weight")
    weights["model.extra"] = norm
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 2)
    with pytest.raises(
        WeightSyncError, match=r"missing: model.norm.weight.*unknown: model.extra.*up_proj.weight is \(3"
    ):
        engine.load_weights(1, weights, "keep")
    assert engine.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.parameters().items())


def test_tied_embeddings_are_one_tensor_under_either_name() -> None:
    model, new = make_model(), make_model(seed=1)
    engine = HFEngine(model, slots=1)
    assert "lm_head.weight" not in engine.parameters()
    state = {name: tensor.half() for name, tensor in new.state_dict().items()}
    assert "lm_head.weight" in state
    engine.load_weights(1, state, "keep")
    text = np.arange(1, 30)
    new.load_state_dict(state)  # rounded to float16, as they travelled
    expected = HFEngine(new, slots=1).score([text])[0]
    assert_close(engine.score([text])[0], expected, atol=FLOAT32)


def test_weights_written_into_parameters_are_the_ones_that_sample() -> None:
    """The transport may fill ``parameters()`` directly; fused projections must see it."""
    engine, new = HFEngine(make_model(), slots=1), make_model(seed=1)
    own = engine.parameters()
    for name, tensor in new.named_parameters():
        own[name].copy_(tensor.detach())
    engine.load_weights(1, own, "keep")
    text = np.arange(1, 30)
    assert_close(engine.score([text])[0], HFEngine(new, slots=1).score([text])[0], atol=FLOAT32)


def test_a_penalty_is_in_the_behavior_logprobs() -> None:
    """Those of the tokens that were sampled, under the penalty for what prompt and response held before each."""
    requests = make_requests(SamplingParams(12, temperature=0.8, repetition_penalty=1.7), [3, 9, 5])
    model = make_model()
    for request in requests:
        result = run(HFEngine(model, slots=2), [request])[request.rollout_id]
        logits = reference_logits(make_model(), request, result)
        text = np.concatenate([request.prompt_ids, result.response_ids])
        for t in range(len(logits)):
            seen = torch.from_numpy(np.unique(text[: len(request.prompt_ids) + t]))
            logits[t, seen] = torch.where(logits[t, seen] > 0, logits[t, seen] / 1.7, logits[t, seen] * 1.7)
        assert_close(result.behavior_logprobs, picked(logits / 0.8, result), atol=FLOAT32)


def test_stop_texts_end_a_response_with_the_token_that_completes_one() -> None:
    plain = make_requests(SamplingParams(40), [3, 9, 5, 2])
    free = run(HFEngine(make_model(), slots=4), plain)

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    stop = decode(free[0].response_ids[6:8].tolist())
    engine = HFEngine(make_model(), slots=4)
    engine.decode = decode
    done = run(engine, make_requests(SamplingParams(40, stop=("##", stop)), [3, 9, 5, 2]))
    for i, result in done.items():
        text = decode(free[i].response_ids.tolist())
        end = text.find(stop) + len(stop) if stop in text else len(text)
        assert np.array_equal(result.response_ids, free[i].response_ids[:end])
        assert_close(result.behavior_logprobs, free[i].behavior_logprobs[:end], atol=FLOAT32)
        assert result.finish_reason == ("stop" if stop in text else "length")
    assert len(done[0].response_ids) <= 8


def test_the_draws_of_an_answer_do_not_depend_on_its_prompts_length() -> None:
    """The n-th token of a seed is drawn by its n-th number: under a model whose tokens are all as likely, the answers
    to prompts of any length are the same."""
    model = make_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    prompts = [Prompt(str(n), "", np.arange(1, 1 + n)) for n in (2, 5, 9)]
    requests = [GenerationRequest(i, i, prompt, 7, SamplingParams(12)) for i, prompt in enumerate(prompts)]
    first, *others = (rollout.response_ids.tolist() for rollout in run(HFEngine(model, slots=4), requests).values())
    assert others == [first, first] and len(set(first)) > 3
