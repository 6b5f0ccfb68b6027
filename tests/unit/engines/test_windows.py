"""The hf engine with sliding windows, soft caps, sinks and unequal heads against plain passes of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from asyncrlhf.engines.hf import slot_attention, slots
from asyncrlhf.engines.hf.forward import SlotPasses
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.engines.hf.layer_shapes import PROBE_NAME
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import GenerationFailure, GenerationRequest, Rollout, SamplingParams
from tests.numeric import assert_close
from tests.unit.engines.test_hf import SIZES, make_requests, picked, run

WINDOW = 6
RING = 8  # places that a layer with such a window keeps
CONTEXT = 96
SMALL: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "max_position_embeddings": CONTEXT,
}
WINDOWED = SMALL | {"sliding_window": WINDOW}
MIXED = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# Scores beyond the cap, so that it counts.
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 1}
LATENT = SMALL | {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 4,
}  # fmt: skip
LATENT.pop("head_dim")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", WINDOWED),
    "qwen2": ("Qwen2", WINDOWED | {"use_sliding_window": True, "max_window_layers": 2}),
    # Its attention function is not told the window: only the mask is.
    "qwen2_moe": ("Qwen2Moe", WINDOWED | EXPERTS | {"use_sliding_window": True, "max_window_layers": 2}),
    "gemma3_text": ("Gemma3", MIXED | {"query_pre_attn_scalar": 8}),
    "cohere2": ("Cohere2", MIXED | {"logit_scale": 1.0}),
    "phi3": ("Phi3", WINDOWED),
    "olmo3": ("Olmo3", MIXED),
    "gemma2": ("Gemma2", MIXED | CAPS),
    "gpt_oss": ("GptOss", MIXED | EXPERTS),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
# transformers' fused attention has no soft caps and no sinks, and its own eager one takes the softmax of most families
# in float32, also of float64 scores.
EAGER = {"gemma2": 1e-5, "gpt_oss": 1e-9}  # with the tolerance of logits
BEHAVIOR = 1e-5  # of log-probs, which engines report in float32


def make_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    family, settings = MODELS[name]
    kind = f"{family}TextConfig" if name == "gemma3_text" else f"{family}Config"
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**(settings | changes))
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    model.set_attn_implementation("eager" if name in EAGER else "sdpa")
    if settings.keys() & EXPERTS.keys():
        model.set_experts_implementation("eager")  # the grouped products know no float64
    for part, parameter in model.named_parameters():
        if part.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


@torch.no_grad()
def plain_logits(model: PreTrainedModel, text: np.ndarray) -> torch.Tensor:
    """Logits [L, V] of one pass of transformers over a text alone."""
    logits: torch.Tensor = model(torch.from_numpy(text)[None], use_cache=False).logits[0]
    return logits


def whole(request: GenerationRequest, result: Rollout) -> np.ndarray:
    return np.concatenate([request.prompt_ids, result.response_ids])


def check(requests: list[GenerationRequest], done: dict[int, Rollout], models: list[PreTrainedModel]) -> None:
    """Every behavior log-prob is that of a plain pass of its version's model."""
    assert {result.policy_versions.max() for result in done.values()} == {len(models) - 1}
    for request in requests:
        result = done[request.rollout_id]
        for version, model in enumerate(models):
            mine = result.policy_versions == version
            logits = plain_logits(model, whole(request, result))[len(request.prompt_ids) - 1 : -1]
            assert_close(result.behavior_logprobs[mine], picked(logits, result)[mine], atol=BEHAVIOR)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.more_but(every=3)
def test_every_logit_equals_that_of_a_plain_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of three windows after prompts shorter and longer than one, siblings of both, and refilled slots."""
    requests = make_requests(SamplingParams(3 * WINDOW), [3, 1, 40, 9], siblings=3)
    for i in (1, 4, 10):
        requests[i] = GenerationRequest(i, i // 3, requests[i].prompt, i, SamplingParams(WINDOW // 2))
    engine, plain = HFEngine(make_model(name), slots=4), make_model(name)
    seen: list[tuple[int, int, torch.Tensor]] = []
    sample = engine._sample

    def recorded(logits: torch.Tensor, rows: Any) -> list[Rollout]:
        for row in rows:
            request = engine._table.requests[row]
            assert request is not None
            seen.append((request.rollout_id, int(engine._table.length[row]) - 1, logits[row].clone()))
        return sample(logits, rows)

    monkeypatch.setattr(engine, "_sample", recorded)
    done = run(engine, requests)
    check(requests, done, [plain])
    expected = {i: plain_logits(plain, whole(requests[i], result)) for i, result in done.items()}
    assert len(seen) == sum(request.sampling.max_completion_length for request in requests)
    mine, theirs = torch.stack([logits for *_, logits in seen]), torch.stack([expected[i][t] for i, t, _ in seen])
    assert_close(mine, theirs, atol=EAGER.get(name, 1e-9))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_answers_in_float32_have_the_log_probs_of_plain_passes(name: str) -> None:
    requests = make_requests(SamplingParams(3 * WINDOW), [*range(1, 26)] * 10, siblings=4)
    assert len(requests) == 1000
    engine, plain = HFEngine(make_model(name).float(), slots=64), make_model(name).float()
    largest = 0.0
    for result in run(engine, requests).values():
        text = np.concatenate([result.prompt.token_ids, result.response_ids])
        logits = plain_logits(plain, text)[len(result.prompt.token_ids) - 1 : -1]
        apart = torch.from_numpy(result.behavior_logprobs) - picked(logits, result)
        largest = max(largest, float(apart.abs().max()))
    print(f"{name}: largest difference {largest:.2g}")
    assert largest < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_score_is_that_of_a_plain_pass(name: str) -> None:
    rng = np.random.default_rng(5)
    passes, plain = SlotPasses(make_model(name), slots=1), make_model(name)
    for length in (7, 2, CONTEXT, WINDOW, WINDOW + 1, 33):
        text = rng.integers(1, 40, length)
        with torch.inference_mode():
            scored = passes.score(text)
        assert_close(scored.clone(), plain_logits(plain, text), atol=EAGER.get(name, 1e-9))


def test_prompts_of_many_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_attention, "QUERY_BLOCK", 5)
    for name in ("gemma3_text", "gemma2", "gpt_oss"):
        test_score_is_that_of_a_plain_pass(name)


def test_siblings_whose_trimmed_writes_are_as_many_as_the_tokens() -> None:
    """A prompt of 15 tokens for two rows with a ring of 8: as many keys are written as tokens packed, yet others."""
    requests = make_requests(SamplingParams(2 * WINDOW), [2 * RING - 1], siblings=2)
    check(requests, run(HFEngine(make_model("mistral"), slots=2), requests), [make_model("mistral")])


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("budget", [8192, 30])
@pytest.mark.more_but(every=3)
def test_a_recompute_in_flight(name: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small budget the new prefills spread over several steps, in which other rows decode."""
    monkeypatch.setattr(slots, "PREFILL_TOKENS", budget)
    requests = make_requests(SamplingParams(3 * WINDOW), [3, 25, 11], siblings=2)
    engine, new = HFEngine(make_model(name), slots=4), make_model(name, seed=1)
    engine.submit(requests)
    for _ in range(WINDOW + 3):
        engine.step(0.0)
    engine.load_weights(1, dict(new.named_parameters()), "recompute")
    check(requests, run(engine), [make_model(name), new])


@torch.no_grad()
def with_kept_cache(old: PreTrainedModel, new: PreTrainedModel, text: np.ndarray, fed: int) -> torch.Tensor:
    """Logits of transformers' own cache, which ``old`` fills with the first ``fed`` tokens and ``new`` with the others,
    one at a time."""
    ids, cache = torch.from_numpy(text)[None], transformers.DynamicCache(config=old.config)
    logits = [old(ids[:, :fed], past_key_values=cache).logits[0]]
    logits += [new(ids[:, t : t + 1], past_key_values=cache).logits[0] for t in range(fed, ids.shape[1])]
    return torch.cat(logits)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_kept_cache_is_that_of_transformers(name: str) -> None:
    """Not for deepseek_v3, whose own cache keeps what a later pass makes keys and values of."""
    requests = make_requests(SamplingParams(3 * WINDOW), [3, 25, 11])
    engine, old, new = HFEngine(make_model(name), slots=3), make_model(name), make_model(name, seed=1)
    engine.submit(requests)
    steps = WINDOW + 3
    for _ in range(steps):
        engine.step(0.0)
    engine.load_weights(1, dict(new.named_parameters()), "keep")
    done = run(engine)
    for request in requests:
        result, prompt = done[request.rollout_id], len(request.prompt_ids)
        # The first new pass feeds the last token that the old weights sampled.
        logits = with_kept_cache(old, new, whole(request, result), prompt + steps - 1)
        assert_close(result.behavior_logprobs, picked(logits[prompt - 1 : -1], result), atol=BEHAVIOR)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_rows_of_unequal_length_move_into_holes(name: str) -> None:
    requests = make_requests(SamplingParams(3 * WINDOW), [5, 2, 3, 40])
    for i in (0, 1):
        requests[i] = GenerationRequest(i, i, requests[i].prompt, i, SamplingParams(2))
    check(requests, run(HFEngine(make_model(name), slots=4), requests), [make_model(name)])


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_sleep_in_flight(name: str) -> None:
    requests = make_requests(SamplingParams(3 * WINDOW), [3, 25, 11], siblings=2)
    engine = HFEngine(make_model(name), slots=4)
    engine.submit(requests)
    for _ in range(WINDOW + 3):
        engine.step(0.0)
    engine.sleep()
    assert cache_bytes(engine) == [0] * len(cache_bytes(engine))
    engine.wake()
    check(requests, run(engine), [make_model(name)])


def test_a_sibling_shares_a_prefill_only_while_the_ring_still_holds_its_prompt() -> None:
    for answer, prefilled in ((2, [10]), (RING, [10, 10, 10])):
        requests = make_requests(SamplingParams(answer), [11], siblings=3)
        engine = HFEngine(make_model("gemma3_text"), slots=1)
        assert prefill_sizes(engine, requests) == prefilled


def prefill_sizes(engine: HFEngine, requests: list[GenerationRequest]) -> list[int]:
    sizes: list[int] = []
    step = engine._passes.step

    def counted(table: Any, prefills: Any) -> torch.Tensor:
        sizes.extend(len(sequence) for sequence, _ in prefills)
        return step(table, prefills)

    engine._passes.step = counted  # type: ignore[method-assign]
    run(engine, requests)
    return sizes


def cache_bytes(engine: HFEngine) -> list[int]:
    assert isinstance(engine._passes, SlotPasses)
    return [group.nbytes for group in engine._passes.groups]


def test_layers_with_a_window_keep_only_their_window() -> None:
    """2 keys and values x 2 layers x 3 slots x 2 heads x 8 numbers of 8 bytes for each place."""
    engine = HFEngine(make_model("gemma3_text"), slots=3)
    sizes = []
    for length in (5, RING, 30, 60):
        run(engine, make_requests(SamplingParams(3), [length - 3]))
        sizes.append(cache_bytes(engine))
    place = 2 * 2 * 3 * 2 * 8 * 8
    assert sizes == [[RING * place, places * place] for places in (8, 8, 32, 64)]


def test_the_context_is_the_models_own_limit() -> None:
    engine = HFEngine(make_model("gemma3_text"), slots=1)
    engine.submit(make_requests(SamplingParams(CONTEXT - 19), [20]))
    [failure] = engine.step(0.0).finished
    assert isinstance(failure, GenerationFailure) and f"context of {CONTEXT}" in failure.error
    requests = make_requests(SamplingParams(CONTEXT - 20), [20])
    check(requests, run(engine, requests), [make_model("gemma3_text")])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.DiffLlamaConfig(**SMALL), "DiffLlamaForCausalLM .* layer 0 attends more than once"),
        (
            transformers.Llama4TextConfig(**SMALL, attention_chunk_size=16, intermediate_size_mlp=64),
            "Llama4ForCausalLM .* sees neither all earlier tokens nor the last few",
        ),
        (
            transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 2),
            "Lfm2ForCausalLM .* 2 of its 4 layers",
        ),
        (transformers.NemotronConfig(**SMALL), "NemotronForCausalLM .* keyword arguments"),
    ],
)
def test_other_attention_is_refused(config: Any, reason: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=reason):
        SlotPasses(model, slots=1)
    assert model.config._attn_implementation != PROBE_NAME
