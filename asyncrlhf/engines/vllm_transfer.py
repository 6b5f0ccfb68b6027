"""The weight-transfer engine that vLLM's workers run: loads tensors that a replica holds, through vLLM's own loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

BACKEND = "asyncrlhf"


@dataclass(frozen=True)
class StagedInitInfo:
    """Nothing has to be agreed on: the learner's process group ends at the replica, not at vLLM's workers."""


@dataclass(frozen=True)
class StagedUpdateInfo:
    """Whole tensors by their names in the checkpoint. A worker in the replica's own process gets them by reference, one
    in another process as a copy."""

    tensors: Mapping[str, torch.Tensor]


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

    def parse_init_info(self, init_dict: dict[str, Any]) -> StagedInitInfo:
        return StagedInitInfo(**init_dict)

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """There is no group to join."""

    def reset_weight_update_target(self) -> None:
        """There is no draft model to come back from."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One chunk; no accelerator is synchronised, since the tensors are complete before they are handed over."""
        self.receive_weights(StagedUpdateInfo(**update_info))

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        with self.device:
            self.model.load_weights(update_info.tensors.items())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self.device:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied_heads()

    def _pack_tied_heads(self) -> None:
        """A head tied to the embedding is never loaded itself, so that on a CPU it would go on with the weights that
        were packed for its kernel at the start."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def drain_pending(self) -> None:
        """Every update is complete when it returns."""

    def shutdown(self) -> None:
        """Nothing is held open."""


def register() -> None:
    """Make the engine known to vLLM; its worker processes call this through the entry point of pyproject.toml."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, StagedWeightTransferEngine.__name__)
