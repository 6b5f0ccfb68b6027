"""Tiny multi-modal checkpoints for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.text_part import missing_towers_left_out

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 32, "vision_output_dim": 16,
    "projector_input_dim": 16, "projector_output_dim": 16, "embed_dim": 16,
}  # fmt: skip
AUDIO = {
    "hidden_size": 16,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "sscp_conv_channel_size": [4, 4],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# Of the text part, where the sizes above do not say all.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4": {"intermediate_size_mlp": 48, "num_local_experts": 4, "moe_layers": [1], "attention_chunk_size": 16,
               "no_rope_layers": [1, 0]},
    "mistral3": {},
    "qwen2_vl": {"rope_parameters": ROPE},
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen3_vl": {"rope_parameters": ROPE},
    "qwen3_vl_moe": {"rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                     "norm_topk_prob": True},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
                "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True}},
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
               "hidden_size_per_layer_input": 8},
    "gemma3n": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 8, "intermediate_size": [48, 48], "laurel_rank": 8,
                "activation_sparsity_pattern": [0.5, 0.0], "final_logit_softcapping": 5.0},
    "paligemma": {},
}  # fmt: skip


def composite(kind: str, **top: Any) -> PreTrainedModel:
    """A random multi-modal model in float32 and ``eval()`` for the packaged tokenizer."""
    tokenizer = load_tokenizer(ModelConfig())
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text = TEXT | ends | {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)} | FAMILIES[kind]
    shape = AutoConfig.for_model(kind)
    parts: dict[str, Any] = {"text_config": {**text, "model_type": shape.text_config.model_type}}
    if shape.vision_config is not None:
        known = shape.vision_config.to_dict()
        sizes = {name: value for name, value in VISION.items() if name in known}
        parts["vision_config"] = {**sizes, "model_type": shape.vision_config.model_type}
        if "deepstack_visual_indexes" in known:
            parts["vision_config"]["deepstack_visual_indexes"] = [0]
    if getattr(shape, "audio_config", None) is not None:
        parts["audio_config"] = AUDIO
    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, **parts, **top)
    with missing_towers_left_out():  # gemma3n's vision tower needs timm
        return AutoModelForMultimodalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()


def save_composite(folder: Path, kind: str, *, shard: str = "50GB", **top: Any) -> PreTrainedModel:
    """Write such a model, with the packaged tokenizer, in files of at most ``shard``; returns it."""
    model = composite(kind, **top)
    model.save_pretrained(folder, max_shard_size=shard)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return model
