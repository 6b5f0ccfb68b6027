"""Updates of a policy whose decoder layers are on several ranks, see ``pipeline.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrlhf.data.weight_files import tied_names
from asyncrlhf.learner.distributed import Peers, Shards, all_sum, whole
from asyncrlhf.learner.forward import PackedPolicy
from asyncrlhf.learner.loading import read_shards
from asyncrlhf.learner.mesh import Mesh
from asyncrlhf.learner.optimizers import build_optimizer
from asyncrlhf.learner.passes import AUTOCAST
from asyncrlhf.learner.pipeline import Stage, StageShards, one_forward_one_backward
from asyncrlhf.learner.plan import Microbatch
from asyncrlhf.learner.state_writer import StateWriter
from asyncrlhf.learner.tensor_parallel import add_up, deal_out_model
from asyncrlhf.learner.updaters import TorchUpdater, gradient_norm, scale_gradient


class PipelineUpdater(TorchUpdater):
    """``learner.pipeline_parallel_size``: the stages of a pipeline have the same batch. Pipelines side by side have
    different shares of it, and the ranks of a stage may divide each matrix (``learner.tensor_parallel_size``).

    A weight that is both embedding and output layer belongs to the first stage; the last stage's copy gets the same
    gradient, the sum of both. A checkpoint is that of one plain rank: rank 0 collects the optimizer's states.
    """

    def _lay_out(self, policy: nn.Module, critic: nn.Module | None) -> None:
        assert isinstance(policy, PackedPolicy) and critic is None
        model = self.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._groups_of_one = build_optimizer(self.config, policy, None).state_dict()["param_groups"]
        groups = build_optimizer(self.config, policy, None).param_groups
        self._order = [names[id(parameter)] for group in groups for parameter in group["params"]]
        self._whole = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
        table = model.get_input_embeddings().weight
        self._tied = names[id(table)] if model.get_output_embeddings().weight is table else None
        self.mesh = Mesh(self.config.mesh, self.device)
        self._partial: list[nn.Parameter] = []  # whose gradients are sums over the mesh's tensor dimension
        self._peers = self.mesh.peers("pipeline")
        self._pipelines = self.mesh.groups("pipeline")
        ends = [dist.new_group([ranks[0], ranks[-1]]) for ranks in self._pipelines]
        own = next(place for place, ranks in enumerate(self._pipelines) if dist.get_rank() in ranks)
        self._ends = Peers(self._peers.rank, 2, ends[own])
        self.policy = self._stage(policy)
        self._modules = [policy]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._copy = None
        if self._tied and self.policy.last:
            self._copy = model.get_output_embeddings().weight
            self._names[id(self._copy)] = self._tied
        self.optimizer = build_optimizer(self.config, policy, None)
        self.optimizers = [self.optimizer]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    def _stage(self, policy: PackedPolicy) -> Stage:
        same = {f"model.{name}": self._tied for name in tied_names(policy.model) if self._tied}
        divided = deal_out_model(policy.model, self.mesh)
        stage = Stage(policy, self._peers, self._pipelines, AUTOCAST.get(self.config.mixed_precision))
        if self.files is None:
            nn.Module.to(policy.model, self.device)
        else:
            read_shards(policy, self.files, self.model, self.device, same)
        if policy.model is self.model:
            own = dict(self.model.named_parameters())
            self._partial = [own[name] for name in divided if name in own]
        return stage

    def frozen(self, module: nn.Module) -> Stage:
        assert isinstance(module, PackedPolicy)
        return self._stage(module)

    @property
    def shards(self) -> Shards:
        return StageShards(self.policy, self._whole)

    def looks(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch]:
        for place in one_forward_one_backward(module, [microbatch.inputs for microbatch in microbatches]):
            yield microbatches[place]

    def trains(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        passes: list[Microbatch | None] = [*microbatches] or [None]
        given = [None if microbatch is None else microbatch.inputs for microbatch in passes]
        for place in one_forward_one_backward(module, given):
            yield passes[place]

    def backward(self, module: Any, loss: torch.Tensor) -> None:
        module.backward(loss)

    def _complete_gradients(self) -> None:
        """Sum them over the pipelines, and of a tied weight over both ends of each."""
        self.policy.settle()
        trained = [parameter for parameter in self.policy.parameters() if parameter.grad is not None]
        for parameter in trained:  # an embedding alone has a gradient that is whole on each rank
            grad: Any = parameter.grad
            if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        add_up(self._partial, self.mesh.peers("tensor"))
        if self.config.shares > 1:
            add_up(trained, self.mesh.peers("replicate"))
        if self._tied and (self.policy.first or self.policy.last):
            table: Any = self._copy if self._copy is not None else self.model.get_input_embeddings().weight
            assert table.grad is not None
            add_up([table], self._ends)

    def clip(self, module: nn.Module) -> torch.Tensor:
        trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
        own = gradient_norm([parameter for parameter in trained if parameter is not self._copy])
        norm = all_sum(own.square(), self._peers).sqrt()
        scale_gradient(trained, self.config.max_grad_norm, norm)
        return norm

    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        """Write the state as one plain rank would: other stages' parts come through host memory."""
        mine = {
            self._names[id(parameter)]: {
                key: whole(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in states.items()
            }
            for parameter, states in self.optimizer.state.items()
            if parameter is not self._copy
        }
        parts: list[Any] | None = [None] * self.ranks if rank == 0 else None
        dist.gather_object(mine if self.mesh.is_first_of("pipeline") else {}, parts)
        found = {name: states for part in parts or [] for name, states in part.items()}
        states = {place: found[name] for place, name in enumerate(self._order) if name in found}
        optimizer = {"state": states, "param_groups": self._groups_of_one}
        return {"optimizer": optimizer, "scaler": self._scaler.state_dict(), "critic": None, "adapter": None}

    def _own_weights(self, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: _as(tensor, saved[name]) for name, tensor in self.model.state_dict().items()}

    def _own_states(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        by_name = dict(enumerate(self._order))
        found = {by_name[place]: states for place, states in saved["state"].items()}
        groups = self.optimizer.state_dict()["param_groups"]
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = {
            place: {key: _as(parameter, value) for key, value in found[name].items()}
            for place, parameter in enumerate(own)
            if (name := self._names[id(parameter)]) in found
        }
        return {"state": states, "param_groups": groups}


def _as(own: torch.Tensor, value: Any) -> Any:
    """This rank's part of a whole ``value`` [as ``own``], if ``own`` is divided over ranks; else ``value``."""
    if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
