"""Tiny mixtures of experts, and routes for their tokens, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.types import TrainBatch

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    # A layer without experts between two with them, whose routes stay 0.
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
                  "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1},
    # Chooses groups of experts first, then experts in them, by other scores than those that weigh them.
    "deepseek_v3": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 8,
                    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
}  # fmt: skip


def mixture(kind: str = "qwen3_moe", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A random float32 model in ``eval()``."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(SIZES | FAMILIES.get(kind, {}) | sizes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def checkpoint(folder: Path, **sizes: Any) -> Path:
    """A Qwen3-MoE with the packaged tokenizer."""
    tokenizer = load_tokenizer(ModelConfig())
    mixture(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_routes(batch: TrainBatch, layers: int, experts: int, chosen: int, seed: int = 0) -> np.ndarray:
    """[T, layers * chosen]: different experts for each token and layer, which no router has chosen."""
    draws = np.random.default_rng(seed)
    order = draws.random((len(batch.token_ids), layers, experts)).argsort(axis=2)[:, :, :chosen]
    return order.reshape(len(batch.token_ids), layers * chosen).astype(np.uint8)


def own_routes(model: PreTrainedModel, text: np.ndarray) -> np.ndarray:
    """The experts [T, layers, chosen] that transformers' own forward chooses, sorted; 0 where there are none."""
    seen: dict[int, np.ndarray] = {}
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            place = int(name.split("layers.")[1].split(".")[0])
            hooks.append(
                module.register_forward_hook(lambda m, a, out, place=place: seen.update({place: out[2].numpy()}))
            )
    with torch.no_grad():
        model(input_ids=torch.from_numpy(text)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    some = next(iter(seen.values()))
    none = np.zeros_like(some)
    return np.stack([np.sort(seen.get(place, none)) for place in range(model.config.num_hidden_layers)], axis=1)
