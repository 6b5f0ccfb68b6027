"""Tensor and expert parallelism by the plans that transformers has for a model's family."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.ranks import Mesh, Peers
from asyncrlhf.learner.settings.model_fits import check_experts, check_heads, check_plan

PARTIAL = "replicated_with_grad_allreduce"  # whole on each rank, where each rank's gradient is one term of a sum
EMBEDDING = "embedding_rowwise"


def deal_out_model(model: transformers.PreTrainedModel, mesh: Mesh) -> list[str]:
    """Convert parameters of ``model`` to DTensors over the mesh's dimensions ``tensor`` and ``expert``, in place, and
    make its modules exchange activations. Ranks along both get the same tokens.

    Returns the names of parameters whose gradients :func:`add_up` must complete. Raises ConfigError for a model that
    cannot be divided evenly.
    """
    if mesh.sizes["tensor"] == mesh.sizes["expert"] == 1:
        return []
    from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism

    tensor, expert = (_plan(model, mesh.sizes[name], name) for name in ("tensor", "expert"))
    tensor = {name: style for name, style in tensor.items() if not _below(name, expert)}
    partial = {name for name, style in tensor.items() if style == PARTIAL}
    # transformers sums these gradients in each backward pass, including what earlier passes had left there.
    tensor = {name: style for name, style in tensor.items() if style != PARTIAL}
    shared = _tied_input(model)
    if tensor and shared is not None:
        tensor |= {shared: EMBEDDING}
    table: Any = model.get_input_embeddings()
    if table.weight.shape[0] % mesh.sizes["tensor"]:
        whole = _vocabulary(model)
        tensor = {name: style for name, style in tensor.items() if name not in whole}
    if expert:
        along = mesh.whole["expert"]
        check_experts(model.config, mesh.sizes["expert"])
        apply_expert_parallelism(model, along, along, expert)
    if tensor:
        check_heads(model.config, mesh.sizes["tensor"])
        apply_tensor_parallelism(model, mesh.whole["tensor"], tensor)
    if shared is not None:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    _check_even(model)
    return [name for name, _ in model.named_parameters() if _generic(name).rpartition(".")[0] in partial]


def add_up(parameters: list[nn.Parameter], peers: Peers) -> None:
    """Complete the gradients of parameters that each of the peers used for its heads alone."""
    for parameter in parameters:
        if parameter.grad is not None:
            grad: Any = parameter.grad
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=peers.group)


def _plan(model: transformers.PreTrainedModel, size: int, name: str) -> dict[str, str]:
    """The family's plan, by module or parameter with ``*`` for numbers; empty if the dimension is 1."""
    if size == 1:
        return {}
    check_plan(model.config, size, name)
    return dict(model.tp_plan if name == "tensor" else model.ep_plan)


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _below(name: str, plan: dict[str, str]) -> bool:
    return any(name == own or name.startswith(f"{own}.") for own in plan)


def _tied_input(model: transformers.PreTrainedModel) -> str | None:
    """The name of the input embedding, where the output layer has the same weight."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not table.weight:
        return None
    return next(name for name, module in model.named_modules() if module is table)


def _vocabulary(model: transformers.PreTrainedModel) -> set[str]:
    """The names of the modules with a row per token; every rank holds them whole if the rows do not divide evenly."""
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    return {name for name, module in model.named_modules() if any(module is table for table in tables)}


def _check_even(model: transformers.PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        size = parameter.device_mesh.size()
        for placement in parameter.placements:
            dim: Any = getattr(placement, "dim", None)
            if dim is not None and parameter.shape[dim] % size:
                raise ConfigError(
                    f"learner.tensor_parallel_size={size} does not divide dimension {dim} of {name}, "
                    f"{tuple(parameter.shape)}; allowed: a divisor of {parameter.shape[dim]}."
                )
