"""How many decoder layers compute their activations again in the backward pass, chosen by the memory that is free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from asyncrlhf.learner.model.forward import MAX_LOGITS, PackedPolicy
from asyncrlhf.learner.model.inputs import PackedInputs

PROBE = 128  # tokens of the pass that measures
SPARE = 0.1  # of what is free, for what is not counted here


def free_bytes(device: torch.device) -> int:
    """What tensors may still take on a GPU, the cache of freed ones included."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def layers_to_repeat(policy: PackedPolicy, layers: Sequence[nn.Module], tokens: int, free: float) -> int:
    """How many of ``layers`` must be repeated so that a pass over ``tokens`` with its backward pass takes at most
    ``free`` bytes beside weights, gradients and the optimizer's states; all of them if that does not suffice."""
    kept, result = _kept(policy, layers)
    head = 3 * MAX_LOGITS * result.itemsize + 4 * tokens * result.shape[-1] * result.itemsize
    room = (1 - SPARE) * free - head - tokens * max(kept)  # one layer is there while it is repeated
    inputs = tokens * result.shape[-1] * result.itemsize  # what is kept of a repeated layer
    for count in range(len(layers)):
        if count * inputs + tokens * sum(kept[count:]) <= room:
            return count
    return len(layers)


def _kept(policy: PackedPolicy, layers: Sequence[nn.Module]) -> tuple[list[float], torch.Tensor]:
    """The bytes that each layer keeps of a token for its backward pass, and a layer's result, by one pass."""
    held = {x.untyped_storage()._cdata for part in policy.modules() for x in _own(part)}
    seen: list[dict[int, int]] = [{} for _ in layers]
    here: list[int] = []
    results: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        key = x.untyped_storage()._cdata
        if here and key not in held:
            seen[here[-1]][key] = x.untyped_storage().nbytes()
        return x

    def enter(place: int) -> None:
        held.update(x.untyped_storage()._cdata for part in layers[place].modules() for x in _own(part))
        here.append(place)

    def leave(found: object) -> None:
        here.pop()
        results.append(found[0] if isinstance(found, tuple) else found)  # type: ignore[arg-type]

    hooks = []
    for place, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, place=place: enter(place)))
        hooks.append(layer.register_forward_hook(lambda _, __, found: leave(found)))
    ids, predicted = np.arange(PROBE, dtype=np.int64) % 4, np.arange(PROBE) >= PROBE // 2
    device = next(policy.parameters()).device
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        policy.alone(PackedInputs.build(ids, np.array([0, PROBE]), predicted, device), 1.0)
    for hook in hooks:
        hook.remove()
    return [math.fsum(sizes.values()) / (PROBE - 1) for sizes in seen], results[-1]


def _own(part: nn.Module) -> list[torch.Tensor]:
    """A module's parameters and buffers, and the casts that hide them."""
    tensors = (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
    return [x for x in tensors if isinstance(x, torch.Tensor)]
