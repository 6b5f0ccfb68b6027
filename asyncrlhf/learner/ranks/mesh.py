"""The learner's ranks as one mesh with named dimensions."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from asyncrlhf.learner.ranks.distributed import Peers, init_single_process_group


class Mesh:
    """The ranks arranged by ``LearnerConfig.mesh``. All ranks build it together."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        init_single_process_group(device)
        # torch warns that DTensors over two dimensions are gathered by two collectives.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.sizes = sizes
        self.whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def data(self) -> DeviceMesh:
        """The ranks that train different shares with the same part of the model: [shard], or [replicate, shard]."""
        return self.whole["replicate", "shard"] if self.sizes["replicate"] > 1 else self.whole["shard"]

    def is_first(self, tensor: DTensor) -> bool:
        """Whether no rank before this one along a dimension that does not divide ``tensor`` has the same part of it."""
        names = tensor.device_mesh.mesh_dim_names
        assert names is not None
        divided = {name for name, at in zip(names, tensor.placements, strict=True) if not at.is_replicate()}
        divided.add("pipeline")  # a stage's tensors are no other stage's
        return all(self.whole.get_local_rank(name) == 0 for name in self.sizes if name not in divided)

    def is_first_of(self, name: str) -> bool:
        """Whether no rank before this one has the same place along ``name``."""
        return all(self.whole.get_local_rank(other) == 0 for other in self.sizes if other != name)

    def groups(self, name: str) -> list[list[int]]:
        """The ranks of every group along one dimension."""
        dim = list(self.sizes).index(name)
        found: list[list[int]] = self.whole.mesh.movedim(dim, -1).reshape(-1, self.sizes[name]).tolist()
        return found

    def peers(self, name: str) -> Peers:
        """This rank's group along one dimension."""
        return Peers(self.whole.get_local_rank(name), self.sizes[name], self.whole.get_group(name))
