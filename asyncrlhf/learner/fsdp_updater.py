"""Updates of weights that FSDP2 shards: each rank keeps a part of every tensor, its gradient and its Adam moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner import checkpoint
from asyncrlhf.learner.distributed import init_single_process_group, padded
from asyncrlhf.learner.plan import Microbatch
from asyncrlhf.learner.shards import Shards, export_model
from asyncrlhf.learner.torch_updater import TorchUpdater

FOLDER = "fsdp2"  # of a checkpoint: torch.distributed.checkpoint's files, readable by any number of ranks


class FsdpUpdater(TorchUpdater):
    """``learner.sharding=fsdp2`` (``fully_shard``, Zhao et al. 2304.11277 for the idea).

    Weights are gathered one decoder layer at a time, in the forward pass and again in the backward pass, and gradients
    are scattered after every microbatch. Both are collective: ranks with fewer microbatches pass dummy data.
    """

    def spread(self, module: nn.Module) -> nn.Module:
        """Decoder layers first, then what is left (embeddings, last norm, head) as one unit.

        Nothing stays gathered between passes: a pass without gradient would leave tensors behind that the next update
        does not reach.
        """
        half = self.config.mixed_precision == "bfloat16"
        init_single_process_group(self.device)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (self.ranks,)),
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16 if half else None, torch.float32 if half else None),
        }
        names = set(self.model._no_split_modules or ())
        for layer in list(module.modules()):
            if type(layer).__name__ in names:
                fully_shard(layer, **options)
        fully_shard(module, **options)
        return module

    def frozen(self, module: nn.Module) -> nn.Module:
        return self.spread(module)

    @property
    def shards(self) -> Shards:
        return Shards(self.model)

    def trains(self, module: nn.Module, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        return iter(padded(microbatches, self.device, self.ranks) or [None])

    def save(self, folder: Path, state: dict[str, Any], rank: int) -> None:
        checkpoint.write(folder, state | {"critic": None if self.critic is None else True}, rank)
        dcp.save(self._state(), checkpoint_id=folder / FOLDER)
        export_model(self.model, folder / checkpoint.MODEL, self.shards, rank)

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(f"{folder / FOLDER} is missing: not a whole learner checkpoint.")
        found = self._state()
        try:
            dcp.load(found, checkpoint_id=folder / FOLDER)
        except (RuntimeError, ValueError, OSError, dcp.CheckpointException) as error:
            raise CheckpointError(f"{folder / FOLDER} does not hold this run's model: {error}") from error
        set_state_dict(
            self._together(), self.optimizer, model_state_dict=found["weights"], optim_state_dict=found["optimizer"]
        )

    def _state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self._together(), self.optimizer)
        return {"weights": weights, "optimizer": optimizer}

    def _together(self) -> nn.Module:
        return nn.ModuleList(self._modules)
