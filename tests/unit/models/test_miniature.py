"""Small models of any family: they run, they keep what makes a family different, and nothing else moves."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from asyncrlhf.errors import ConfigError
from asyncrlhf.models.miniature import build_miniature, miniature_config

# One family of each way to look at a text: full, grouped, windows, chunks, soft caps, sinks, alibi, absolute places,
# latent keys, experts, state spaces, linear attention, convolutions, parts of a larger model.
FAMILIES = (
    "llama", "gpt2", "bloom", "mpt", "gemma2", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "jamba", "mamba2", "bamba",
    "qwen3_next", "lfm2", "rwkv", "xlstm", "recurrent_gemma", "zamba2", "olmo_hybrid", "minimax", "glm4_moe", "phi3",
)  # fmt: skip


def logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_earlier_token_matters_and_no_later_one(family: str) -> None:
    model = build_miniature(AutoConfig.for_model(family), dtype=torch.float64)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    ids = torch.randint(3, 90, (12,), generator=torch.Generator().manual_seed(1))
    found = logits(model, ids)
    assert torch.isfinite(found).all()
    for place in (0, 8):  # the last token is inside the smallest window of the second, and outside that of the first
        other = ids.clone()
        other[place] = 90
        moved = (logits(model, other) - found).abs().amax(-1)
        assert (moved[:place] < 1e-9).all(), "a later token changed an earlier prediction"
        assert moved[place:10].min() > 1e-4, f"token {place} is invisible to a later prediction"


def test_weights_follow_the_seed_alone_and_global_states_stay() -> None:
    shape = AutoConfig.for_model("gemma3")
    before, states = copy.deepcopy(shape.to_dict()), (torch.get_rng_state(), random.getstate())
    first, second, other = (build_miniature(shape, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert shape.to_dict() == before
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "family, given, kept",
    [
        ("gemma2", {}, {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "sliding_window": 8}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20, "num_hidden_layers": 24,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "attention_dropout": 0.1},
         {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "attention_dropout": 0.1,
          "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}),
        ("llama4", {}, {"attention_chunk_size": 8, "attn_scale": 0.1}),
        ("deepseek_v3", {}, {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                             "first_k_dense_replace": 2, "num_hidden_layers": 4, "n_group": 2, "topk_group": 1}),
        ("qwen3_next", {}, {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                            "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}),
        ("bamba", {}, {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                   "max_position_embeddings": 131072, "tie_word_embeddings": True, "eos_token_id": [128001, 2]},
         {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
          "tie_word_embeddings": True, "max_position_embeddings": 512}),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48,
                                      "long_factor": [float(i) for i in range(1, 49)],
                                      "original_max_position_embeddings": 4096},
                  "max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
         {"original_max_position_embeddings": 16}),
        ("falcon", {"alibi": True, "num_kv_heads": 1}, {"alibi": True, "num_kv_heads": 1}),
        ("smollm3", {}, {"no_rope_layers": [1, 1, 0, 0]}),
    ],
)  # fmt: skip
def test_what_makes_a_family_different_stays(family: str, given: dict[str, Any], kept: dict[str, Any]) -> None:
    found = miniature_config(AutoConfig.for_model(family, **given))
    assert {name: getattr(found, name) for name in kept} == kept
    ids = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    assert all(token is None or token < found.vocab_size for token in ids)


def test_a_model_that_generates_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="vit does not generate text"):
        build_miniature(AutoConfig.for_model("vit"))
