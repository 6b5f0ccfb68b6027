"""Bytes on one device, by part: learner rank (docs/learners.md), generator, frozen models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrlhf.planner.shapes import ModelShape

USABLE = 0.92  # of a device's memory: allocators, kernels' workspaces and the communicators take the rest
MAX_LOGITS = 2**27  # elements that the learner holds at once (learner/model/forward.py); beyond this it recomputes them

# Bytes per parameter: (on every rank, divided among the ranks), by dtype and layout. ZeRO-3 and FSDP2 gather a layer.
LEARNER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "float32": {"0": (16, 0), "1": (8, 12), "2": (4, 16), "3": (0, 20), "fsdp2": (0, 16)},
    "bfloat16": {"0": (16, 0), "1": (6, 12), "2": (2, 16), "3": (0, 18), "fsdp2": (0, 16)},
}


@dataclass(frozen=True)
class Bytes:
    """Bytes on one device by part."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def refusal(self, memory: float, who: str) -> str | None:
        """One sentence if the parts do not fit into a device of ``memory`` bytes, else None."""
        if self.total <= USABLE * memory:
            return None
        most = max(self.parts, key=lambda name: self.parts[name])
        held = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items())
        return (
            f"{who} needs {self.total / 1e9:.1f} GB of {USABLE * memory / 1e9:.1f} usable GB: {held}; "
            f"{most} is the largest part."
        )


def layout_bytes(parameters: float, layout: str, ranks: int, dtype: str = "bfloat16") -> float:
    """Weights, gradients, master weights and moments of our learner on one rank, without the gathered layer."""
    whole, shared = LEARNER[dtype][layout]
    return parameters * (whole + shared / ranks)


def learner_bytes(
    shape: ModelShape, layout: str, ranks: int, tokens: int, *, dtype: str = "bfloat16", checkpointing: bool = True,
    sequence_parallel: int = 1, tensor: int = 1, pipeline: int = 1, frozen: int = 0,
) -> Bytes:  # fmt: skip
    """One rank with microbatches of ``tokens``, which ``sequence_parallel`` ranks divide; ``frozen``: number of frozen
    models on it, sharded like the policy. A pipeline's first stage has as many microbatches in flight as stages."""
    width, own = (2 if dtype == "bfloat16" else 4), tokens / sequence_parallel
    gathered = shape.block_parameters / tensor * width if layout in ("3", "fsdp2") else 0.0
    layer = 17.0 * width * own * shape.hidden / tensor  # 34 bytes per token and channel in bfloat16
    parameters, ranks = shape.parameters / (tensor * pipeline), ranks // (tensor * pipeline)
    kept = width * own * shape.layers * shape.hidden if checkpointing else shape.layers * layer
    share = ranks if layout in ("3", "fsdp2") else 1
    return Bytes(
        {
            "weights and optimizer": layout_bytes(parameters, layout, ranks, dtype) + gathered,
            "activations": kept + (layer if checkpointing else 0.0),
            "logits": 4.0 * min(own * shape.vocabulary, MAX_LOGITS),
            "frozen models": frozen * parameters * width / share,
        }
    )


def generator_bytes(
    shape: ModelShape, context_tokens: float, tensor_parallel: int = 1, pipeline: int = 1, *, dtype: str = "bfloat16"
) -> Bytes:
    """One device of a replica whose cache holds ``context_tokens``."""
    shards, width = tensor_parallel * pipeline, 2 if dtype == "bfloat16" else 4
    cache = context_tokens * shape.kv_bytes * width / 2
    return Bytes({"weights": width * shape.parameters / shards, "key-value cache": cache / shards})
