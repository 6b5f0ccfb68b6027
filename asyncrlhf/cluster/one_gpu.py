"""One GPU for learner and generators at once: what the learner needs of its memory, and what is left for engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.cluster.placement import Specs
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.vllm.memory_share import CONTEXT_BYTES, blank_model, memory_share, weight_bytes
from asyncrlhf.models.checkpoint_folder import load_shape
from asyncrlhf.transport.weights_config import resolve_dtype

STATES = {"adamw_8bit": 2}  # bytes per parameter of the optimizer's states; AdamW's, as of others, are 8


def learner_needs(config: RunConfig) -> dict[str, float]:
    """Bytes on the GPU of a learner of one rank at work, by what they are for."""
    from asyncrlhf.learner.model.forward import MAX_LOGITS  # imports what a driver without this placement does not need

    own, algorithm = config.learner, config.algorithm
    blank, text = blank_model(config.model), load_shape(config.model).get_text_config()
    parameters = sum(p.numel() for p in blank.parameters())
    rank, linear = config.model.lora.r, [m for m in blank.modules() if isinstance(m, torch.nn.Linear)]
    trained = rank * sum(m.in_features + m.out_features for m in linear) if rank else parameters
    width, copies = (4, 0) if own.mixed_precision == "none" else (2, 2)  # the passes have copies of the weights
    models = 1 + (algorithm.needs_critic and not config.critic_served)
    frozen = _itemsize(config.model.dtype) * (algorithm.needs_reference and not config.reference_served)
    sent = _itemsize(resolve_dtype(config.weights.dtype, config.engine_dtypes) or "float32")
    tokens = max(own.token_budget, config.generator.max_completion_length)
    layers = text.num_hidden_layers
    residuals, layer = 4.0 * tokens * text.hidden_size * layers, tokens * _of_a_layer(text, width)
    return {
        "weights": parameters * (4.0 + copies) * models,
        "gradients and optimizer": trained * (4.0 + STATES.get(own.optim, 8)) * models,
        "activations": residuals + layer if own.gradient_checkpointing else layers * layer,
        # In float32 and with their gradients.
        "logits": 8.0 * min(tokens * text.vocab_size, MAX_LOGITS),
        "frozen models": parameters * (frozen + 4.0 * (algorithm.anchor == "ema")),
        "the copy that generators load": float(trained * sent),
    }


def _of_a_layer(text: Any, width: int) -> float:
    """Bytes per token that a layer keeps for its backward pass, measured on Llamas: 36 per channel in both formats, and
    4 numbers of ``width`` bytes per channel of the wide layer, or of those of all experts that a token passes."""
    experts = getattr(text, "num_experts_per_tok", None) or 1
    wide = (experts > 1 and getattr(text, "moe_intermediate_size", None)) or getattr(text, "intermediate_size", None)
    return float(
        36 * text.hidden_size + 4 * width * experts * (wide if isinstance(wide, int) else 4 * text.hidden_size)
    )


def beside_the_learner(specs: Specs, needs: Mapping[str, float]) -> Specs:
    """``specs`` whose generators know the bytes that the learner and the other replicas' processes take of their GPU,
    and their part of the rest, by their shares of the GPU."""
    shares = sum(spec.generator.gpus for spec in specs.generators)
    beside = int(sum(needs.values())) + CONTEXT_BYTES * (len(specs.generators) - 1)
    told = [replace(s, beside_bytes=beside, part_of_rest=s.generator.gpus / shares) for s in specs.generators]
    return replace(specs, generators=told)


def said_of_memory(needs: Mapping[str, float], generators: Sequence[GeneratorSpec], total: int) -> str:
    """Who may take what of a GPU of ``total`` bytes; ConfigError if the weights of a replica alone do not fit."""
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in needs.items() if size)
    said = [f"the learner {_gb(sum(needs.values()))} ({parts})"]
    for spec in generators:
        weights = weight_bytes(spec.generator, spec.model)
        share = memory_share(spec.name, total, total, spec.beside_bytes, weights, spec.part_of_rest, asleep=False)
        set_by_user = spec.generator.engine == "vllm" and spec.generator.vllm.gpu_memory_utilization
        room = (set_by_user or share) * total
        said.append(f"{spec.name} {_gb(room)}, of which {_gb(room - weights)} for its key-value cache")
    return f"One GPU of {_gb(total)} for all at once: {'; '.join(said)}."


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _gb(size: float) -> str:
    return f"{size / 1e9:.{1 if size >= 1e8 else 3}f} GB"
