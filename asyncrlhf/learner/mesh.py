"""The learner's ranks as one mesh with named dimensions."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrlhf.learner.distributed import Peers, init_single_process_group


class Mesh:
    """The ranks arranged by ``LearnerConfig.mesh``. All ranks build it together."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        init_single_process_group(device)
        # DTensors over two dimensions are gathered by one collective after another, which torch calls suboptimal.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.sizes = sizes
        self.whole = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def data(self) -> DeviceMesh:
        """The ranks that train different shares with the same part of the model: [shard], or [replicate, shard]."""
        return self.whole["replicate", "shard"] if self.sizes["replicate"] > 1 else self.whole["shard"]

    def peers(self, name: str) -> Peers:
        """This rank's group along one dimension."""
        return Peers(self.whole.get_local_rank(name), self.sizes[name], self.whole.get_group(name))
