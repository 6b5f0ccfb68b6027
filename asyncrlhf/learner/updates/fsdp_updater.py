"""Weights as DTensors over the mesh of the learner's ranks: FSDP2 and the parallelisms composed with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.loading import read_shards
from asyncrlhf.learner.model.tensor_parallel import add_up, deal_out_model
from asyncrlhf.learner.ranks import Mesh, Shards, padded
from asyncrlhf.learner.state.state_file import read_sharded
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.learner.step.plan import Microbatch
from asyncrlhf.learner.updates.updaters import TorchUpdater

FOLDER = "fsdp2"  # of a checkpoint: one file per rank, readable by any number of ranks in any mesh


class FsdpUpdater(TorchUpdater):
    """``learner.sharding=fsdp2`` (``fully_shard``, Zhao et al. 2304.11277 for the idea), over the mesh's dimensions
    ``replicate`` and ``shard``; also tensor and expert parallelism inside them. Without sharding ``shard`` is 1.

    Weights are gathered one decoder layer at a time, in the forward pass and again in the backward pass, and gradients
    are scattered after every microbatch, or once an update (``learner.gradient_reduction``). Both are collective:
    ranks with fewer microbatches pass dummy data.
    """

    def _lay_out(self, policy: nn.Module, critic: nn.Module | None) -> None:
        self.mesh = Mesh(self.config.mesh, self.device)
        self._partial: list[tuple[nn.Module, str]] = []  # whose gradients are sums over the mesh's tensor dimension
        super()._lay_out(policy, critic)

    def spread(self, module: nn.Module) -> nn.Module:
        """Decoder layers first, then the rest (embeddings, last norm, head) as one unit.

        No tensor stays gathered between passes: one that a pass without gradient left gathered would miss the next
        update.
        """
        half = self.config.mixed_precision == "bfloat16"
        options: dict[str, Any] = {
            "mesh": self.mesh.data,
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16 if half else None, torch.float32 if half else None),
        }
        part: Any = "model" if isinstance(module, PackedPolicy) else "trunk"
        for name in deal_out_model(cast(PreTrainedModel, module.get_submodule(part)), self.mesh):
            self._partial.append((module, f"{part}.{name}"))
        names = set(self.model._no_split_modules or ())
        for layer in list(module.modules()):
            if type(layer).__name__ in names:
                fully_shard(layer, **options)
        fully_shard(module, **options)
        if self.files is not None:
            read_shards(module, self.files, self.model, self.device)
        return module

    def frozen(self, module: nn.Module) -> nn.Module:
        return self.spread(module)

    @property
    def shards(self) -> Shards:
        return Shards(self.model)

    def trains(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        passes = padded(microbatches, self.device, self.ranks) or [None]
        for index, microbatch in enumerate(passes):
            last = index == len(passes) - 1
            module.set_requires_gradient_sync(last or self.config.gradient_reduction == "microbatch")
            yield microbatch

    def _complete_gradients(self) -> None:
        add_up([module.get_parameter(name) for module, name in self._partial], self.mesh.peers("tensor"))

    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        writer.write_state(folder / FOLDER / f"rank-{rank}.safetensors", self._state(), ours=self.mesh.is_first)
        return {"critic": None if self.critic is None else True}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        files = sorted((folder / FOLDER).glob("rank-*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder / FOLDER} is missing: not a whole learner checkpoint.")
        own = self._state()
        settings = own["optimizer"].pop("param_groups")  # this run's own: another mesh groups parameters differently
        found = read_sharded(own | {"optimizer": own["optimizer"] | {"param_groups": []}}, files)
        optimizer = found["optimizer"] | {"param_groups": settings}
        states = {"model_state_dict": found["weights"], "optim_state_dict": optimizer}
        set_state_dict(nn.ModuleList(self._modules), self.optimizer, **states)

    def _state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(nn.ModuleList(self._modules), self.optimizer)
        return {"weights": weights, "optimizer": optimizer}
