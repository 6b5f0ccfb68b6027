"""Tiny random decoders of many families, with weights so large that every token, position and state matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
GROUPED = {"num_key_value_heads": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
GPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
    "mamba_expand": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = 8

FAMILIES: dict[str, dict[str, Any]] = {
    # States alone.
    "mamba": SIZES | {"state_size": 6, "time_step_rank": 4},
    "mamba2": SIZES | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    # States beside attention, in one layer or in turns; convolutions; linear attention.
    "falcon_h1": SIZES | GROUPED | MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "lfm2": SIZES | GROUPED | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "block_ff_dim": 48},
    "granitemoehybrid": SIZES | GROUPED | MAMBA2 | EXPERTS | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
    "bamba": SIZES | GROUPED | MAMBA2 | {"attn_layer_indices": [1]},
    "qwen3_next": SIZES | GROUPED | {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "jamba": SIZES | GROUPED | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 6, "mamba_dt_rank": 4,
    },
    "minimax": SIZES | GROUPED | EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"], "block_size": 4, "head_dim": 8,
    },
    # Attention of other kinds than the interface's: biases by distance, own code, chunks, windows.
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SIZES | {"alibi": True, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": False},
    "falcon_rotary": SIZES | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
            "expansion_ratio": 2},
    "gptj": GPT_SIZES | {"rotary_dim": 4},
    "codegen": GPT_SIZES | {"rotary_dim": 4},
    "stablelm": SIZES | GROUPED | {"use_parallel_residual": True},
    "llama4_text": SIZES | GROUPED | EXPERTS | {
        "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 48, "num_experts_per_tok": 1,
        "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2,
    },
    "gemma3_text": SIZES | GROUPED | {
        "head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": SIZES | GROUPED | {"sliding_window": WINDOW},
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                "max_position_embeddings": 128, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    # No cache that could be used: states kept in the modules; states that are right for one row only.
    "recurrent_gemma": SIZES | {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"], "head_dim": 8,
    },
    "rwkv": SIZES | {"attention_hidden_size": 32, "context_length": 128, "rescale_every": 0},
}  # fmt: skip
UNCACHED = ("recurrent_gemma", "rwkv")


def family(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: Any) -> PreTrainedModel:
    """A random model in ``eval()``."""
    options = FAMILIES[name] | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None} | sizes
    config = AutoConfig.for_model(options.pop("model_type", name), **options)
    # torch has no grouped product for float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **experts)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() < 0.2:
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() == 1 and parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()
