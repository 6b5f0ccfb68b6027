"""Weights into and out of vLLM's workers: a weight-transfer engine that loads a replica's tensors by vLLM's own loader,
and the way back to the checkpoint's names: unfused, unpadded, unpacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

BACKEND = "asyncrlhf"


class StagedWeightTransferEngine:
    """vLLM's ``WeightTransferEngine`` interface (its methods; importing the base class would import vLLM here).

    vLLM's layerwise reload gives every layer its checkpoint layout back, the model's ``load_weights`` fuses and shards,
    and each complete layer is packed again into the memory it had before.
    """

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.device = device
        self.model = model
        self.model_config = vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> None:
        """Nothing to parse: the learner's process group ends at the replica, not at vLLM's workers."""

    def init_transfer_engine(self, init_info: None) -> None:
        """Does nothing: there is no group to join."""

    def reset_weight_update_target(self) -> None:
        """Does nothing: there is no draft model."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._forget_unfinished()
        initialize_layerwise_reload(self.model)

    def _forget_unfinished(self) -> None:
        """Remove the state of an interrupted update: layers without memory, and parts of incomplete layers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        unfinished = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        for info in unfinished:
            info.load_numel, info.loaded_weights = 0, []
        if unfinished:
            with self.device:
                finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one chunk: ``tensors``, whole ones by their names in the checkpoint. A worker in the replica's own
        process gets them by reference, one in another process as a copy. They are complete, so no accelerator is
        synchronised."""
        with self.device:
            self.model.load_weights(update_info["tensors"].items())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self.device:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied_heads()
            pack_experts(self.model)

    def _pack_tied_heads(self) -> None:
        """Pack heads tied to the embedding: they are never loaded themselves, so that on a CPU they would keep the
        weights that were packed for their kernel at the start."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def drain_pending(self) -> None:
        """Does nothing: every update is complete when it returns."""

    def shutdown(self) -> None:
        """Does nothing: there are no open resources."""


def register() -> None:
    """Register the engine with vLLM, whose worker processes call this through the entry point of pyproject.toml."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, StagedWeightTransferEngine.__name__)


def routed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of a model that hold the experts of a mixture."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return ((path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts))


def pack_experts(model: nn.Module) -> None:
    """Pack the experts again after a load: on a CPU vLLM 0.32 packs them for its kernel only at the start."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    for _, layer in routed_experts(model):
        if (isa := _packed_for(layer)) is not None:
            for matrix in (layer.w13_weight, layer.w2_weight):
                matrix.data.copy_(cpu_prepack_moe_weight(matrix.data, isa))


def _packed_for(layer: Any) -> str | None:
    """The CPU kernel for which the experts are packed; None if they have the checkpoint's layout."""
    kernel: Any = getattr(getattr(layer.quant_method, "moe_kernel", None), "fused_experts", None)
    return None if getattr(kernel, "_use_zentorch", True) else str(kernel.isa)


def sample_below(worker: Any, limit: int) -> None:
    """Runs in a vLLM worker: ids from ``limit`` on get no probability, in sampling and in scored texts. A request's
    own settings (allowed tokens, biases) do not reach the log-probs of a scored text."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def cut(module: nn.Module, inputs: Any, logits: torch.Tensor | None) -> None:
        if logits is not None:  # as on all ranks but one that gathers
            logits[..., limit:] = -torch.inf

    for module in worker.get_model().modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_hook(cut)


_ROWS = 1024  # of the identity, in one product


def worker_tensors(worker: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Runs in a vLLM worker: its share of each tensor, on the CPU, and the dimension along which the workers of a
    tensor-parallel group split it (None: each has the whole)."""
    model = worker.get_model()
    with torch.no_grad():
        return {name: (tensor.detach().cpu().clone(), dim) for name, tensor, dim in _unfused(model)}


def merge_shares(shares: Sequence[Mapping[str, tuple[torch.Tensor, int | None]]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the results of all workers of a replica, in the order of their ranks."""
    merged: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for share in shares for name in share):
        parts = [share[name] for share in shares if name in share]
        dim = parts[0][1]
        merged[name] = parts[0][0] if dim is None else torch.cat([tensor for tensor, _ in parts], dim)
        if merged[name].dim() == 4:  # gate and up of a mixture's experts
            merged[name] = merged[name].flatten(1, 2)
    return merged


def _unfused(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    parts = getattr(model, "packed_modules_mapping", {})
    experts = dict(routed_experts(model))
    for inner, module in model.named_modules():
        path = inner.removesuffix(".base_layer")  # within a layer with an adapter
        if path in experts:
            yield from _experts(path, module)
        elif isinstance(module, LinearBase):
            yield from _linear(path, module, parts)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _embedding(path, module)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", parameter, None


def _experts(path: str, layer: Any) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """All experts of a layer in transformers' layout: gate and up [E, 2, I, hidden], whose middle dimensions
    :func:`merge_shares` joins, and down [E, hidden, I]."""
    parent = path.removesuffix(".routed_experts")
    own = layer.moe_config.intermediate_size_per_partition
    up, down = (_unpacked(layer, matrix) for matrix in (layer.w13_weight.data, layer.w2_weight.data))
    whole = layer.use_ep  # each worker has some experts as a whole
    yield f"{parent}.gate_up_proj", up.unflatten(1, (2, -1))[:, :, :own], 0 if whole else 2
    yield f"{parent}.down_proj", down[:, :, :own], 0 if whole else 2


def _unpacked(layer: Any, packed: torch.Tensor) -> torch.Tensor:
    """The experts' matrices [E, out, in] in the checkpoint's order. Packing only permutes elements: the permutation is
    found by packing numbers, in digits that every dtype can hold."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    if (isa := _packed_for(layer)) is None:
        return packed
    shape = (1, *packed.shape[1:])
    places = torch.arange(packed[0].numel())
    order, left, unit = torch.zeros_like(places), places, 1
    while bool(left.any()):
        digits = (left % _DIGIT).to(packed.dtype).view(shape)
        order += cpu_prepack_moe_weight(digits, isa).flatten().long() * unit
        left, unit = left // _DIGIT, unit * _DIGIT
    found = torch.empty_like(packed)
    found.flatten(1)[:, order] = packed.flatten(1)
    return found


_DIGIT = 128


def _linear(path: str, layer: Any, parts: Mapping[str, list[str]]) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear

    parent, _, own = path.rpartition(".")
    names, sizes = [own], None
    if own in parts and len(parts[own]) > 1:
        names = parts[own]
        if isinstance(layer, QKVParallelLinear):
            values = getattr(layer, "v_head_size", layer.head_size)
            sizes = [layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size]
            sizes.append(layer.num_kv_heads * values)
        else:
            sizes = list(layer.output_partition_sizes)
    rows, columns = (None, 1) if isinstance(layer, RowParallelLinear) else (0, 0)
    if isinstance(layer, ReplicatedLinear):
        rows = columns = None  # type: ignore[assignment]
    for kind, whole, dim in (("weight", packed_matrix(layer), columns), ("bias", layer.bias, rows)):
        pieces = () if whole is None else whole.split(sizes) if sizes else [whole]
        for name, piece in zip(names, pieces, strict=whole is not None):
            yield f"{parent}.{name}.{kind}" if parent else f"{name}.{kind}", piece, dim


def _embedding(path: str, layer: Any) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    share = layer.shard_indices
    rows = share.num_org_elements
    # The head may have been packed from other weights than the embedding's.
    matrix = packed_matrix(layer) if isinstance(layer, ParallelLMHead) else layer.weight
    yield f"{path}.weight", matrix[:rows], 0
    if getattr(layer, "bias", None) is not None:
        yield f"{path}.bias", layer.bias[:rows], 0


def packed_matrix(layer: Any) -> torch.Tensor:
    """The matrix [out, in] that the layer multiplies with.

    On a CPU vLLM packs it for its kernel and frees the original: the product with the identity restores it, bit by bit
    except for the sign of zeros.
    """
    weight: torch.Tensor = layer.weight
    if not hasattr(layer, "cpu_linear"):
        return weight
    # A layer that every worker has whole, such as a mixture's gate, has no partition.
    width = getattr(layer, "input_size_per_partition", layer.input_size) if weight.numel() == 0 else weight.shape[1]
    identity = torch.eye(width, dtype=weight.dtype, device=weight.device)
    columns = [layer.quant_method.apply(layer, rows) for rows in identity.split(_ROWS)]
    return torch.cat(columns).T.contiguous()
