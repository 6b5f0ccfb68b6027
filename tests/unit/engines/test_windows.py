"""The hf engine with sliding windows, soft caps, sinks and unequal heads against plain eager passes of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from asyncrlhf.engines.engine import CacheMode
from asyncrlhf.engines.forward import SlotPasses, is_lean
from asyncrlhf.engines.hf import HFEngine
from asyncrlhf.errors import ConfigError
from asyncrlhf.types import GenerationFailure, GenerationRequest, Rollout, SamplingParams
from tests.numeric import FLOAT32, assert_close
from tests.unit.engines.test_hf import SIZES, make_requests, picked, run

WINDOW = 8
CONTEXT = 96
SMALL: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "max_position_embeddings": CONTEXT,
    "attn_implementation": "eager",
}
WINDOWED = SMALL | {"sliding_window": WINDOW}
MIXED = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# Scores beyond the cap, so that it counts.
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 1}
LATENT = SMALL | {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 2,
}  # fmt: skip
LATENT.pop("head_dim")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", WINDOWED),
    "qwen2": ("Qwen2", WINDOWED | {"use_sliding_window": True, "max_window_layers": 2}),
    # Its attention function is not told the window: only the mask is.
    "qwen2_moe": ("Qwen2Moe", WINDOWED | EXPERTS | {"use_sliding_window": True, "max_window_layers": 2}),
    "gemma3_text": ("Gemma3", MIXED | {"query_pre_attn_scalar": 8}),
    "cohere2": ("Cohere2", MIXED),
    "phi3": ("Phi3", WINDOWED),
    "olmo3": ("Olmo3", MIXED),
    "gemma2": ("Gemma2", MIXED | CAPS),
    "gpt_oss": ("GptOss", MIXED | EXPERTS),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
# Families whose eager attention takes the softmax in float32, and what a float64 pass can agree to.
ROUNDED = 1e-5


def make_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    family, settings = MODELS[name]
    config = getattr(transformers, family + ("TextConfig" if name == "gemma3_text" else "Config"))(
        **(settings | changes)
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, text: np.ndarray) -> np.ndarray:
    """Log-probs [L - 1] of a text's tokens but the first, by one eager pass over it alone."""
    assert model.config._attn_implementation == "eager"
    ids = torch.from_numpy(text)
    logits = model(ids[None], use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()


def check(requests: list[GenerationRequest], done: dict[int, Rollout], models: list[PreTrainedModel]) -> None:
    """Every behavior log-prob is that of a plain pass of its version's model."""
    for request in requests:
        result = done[request.rollout_id]
        text, first = np.concatenate([request.prompt_ids, result.response_ids]), len(request.prompt_ids) - 1
        for version, model in enumerate(models):
            mine = result.policy_versions == version
            expected = plain_logprobs(model, text)[first:]
            assert_close(result.behavior_logprobs[mine], expected[mine], atol=ROUNDED)


@pytest.mark.parametrize("name", MODELS)
def test_behavior_logprobs_equal_a_plain_eager_pass(name: str) -> None:
    """Answers of three windows after prompts shorter and longer than one, siblings of both, and refilled slots.

    With a prompt of 15 tokens and two siblings as many keys are written as tokens are packed, though not the same.
    """
    requests = make_requests(SamplingParams(3 * WINDOW), [3, 1, 15, 40, 9], siblings=3)
    for i in (1, 4, 10):
        requests[i] = GenerationRequest(i, i // 3, requests[i].prompt, i, SamplingParams(WINDOW // 2))
    plain = make_model(name)
    check(requests, run(HFEngine(make_model(name), slots=4), requests), [plain])
    pair = make_requests(SamplingParams(2 * WINDOW), [15], siblings=2)
    check(pair, run(HFEngine(make_model(name), slots=2), pair), [plain])


@pytest.mark.parametrize("name", MODELS)
def test_score_equals_a_plain_eager_pass(name: str) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(1, 40, length) for length in (7, 2, CONTEXT, WINDOW, WINDOW + 1, 33)]
    scores = HFEngine(make_model(name), slots=1).score(texts)
    for text, score in zip(texts, scores, strict=True):
        assert_close(score, plain_logprobs(make_model(name), text), atol=ROUNDED)
