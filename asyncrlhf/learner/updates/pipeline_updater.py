"""Updates of a policy whose decoder layers are on several ranks, see ``pipeline.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.loading import read_into, read_shards
from asyncrlhf.learner.model.pipeline import Stage, StageShards, one_forward_one_backward
from asyncrlhf.learner.model.tensor_parallel import add_up, deal_out_model
from asyncrlhf.learner.ranks import Mesh, Peers, Shards, all_sum
from asyncrlhf.learner.state import checkpoint
from asyncrlhf.learner.state.state_file import read_parts
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.learner.step.passes import FORMATS
from asyncrlhf.learner.step.plan import Microbatch
from asyncrlhf.learner.updates.optimizers import build_optimizer
from asyncrlhf.learner.updates.updaters import TorchUpdater, gradient_norm, scale_gradient
from asyncrlhf.models.weight_files import WeightFiles, tied_names


class PipelineUpdater(TorchUpdater):
    """``learner.pipeline_parallel_size``: the stages of a pipeline have the same batch. Pipelines side by side have
    different shares of it, and the ranks of a stage may divide each matrix (``learner.tensor_parallel_size``).

    A weight that is both embedding and output layer belongs to the first stage; the last stage's copy gets the same
    gradient, the sum of both. One plain rank reads its checkpoints, and the other way round.
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
        self._same = {f"model.{name}": self._tied for name in tied_names(model) if self._tied}
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
        self._copy: Any = None  # of a tied weight on the last stage
        self._end: Any = None  # of a tied weight on both ends
        if self._tied and self.policy.first:
            self._end = model.get_input_embeddings().weight
        if self._tied and self.policy.last:
            self._copy = self._end = model.get_output_embeddings().weight
            self._names[id(self._copy)] = self._tied
        self.optimizer = build_optimizer(self.config, policy, None)
        self.optimizers = [self.optimizer]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    def _stage(self, policy: PackedPolicy) -> Stage:
        divided = deal_out_model(policy.model, self.mesh)
        stage = Stage(policy, self._peers, self._pipelines, FORMATS.get(self.config.mixed_precision))
        if self.files is None:
            nn.Module.to(policy.model, self.device)
        else:
            read_shards(policy, self.files, self.model, self.device, self._same)
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
            assert self._end is not None and self._end.grad is not None
            add_up([self._end], self._ends)

    def clip(self, module: nn.Module) -> torch.Tensor:
        trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
        own = gradient_norm([parameter for parameter in trained if parameter is not self._copy])
        norm = all_sum(own.square(), self._peers).sqrt()
        scale_gradient(trained, self.config.max_grad_norm, norm)
        return norm

    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        """Each rank writes the optimizer's states of the parts that no rank before it has."""
        mine = {
            self._names[id(parameter)]: states
            for parameter, states in self.optimizer.state.items()
            if parameter is not self._copy and self._is_first(parameter)
        }
        if mine:
            writer.write_state(folder / checkpoint.STAGES / f"rank-{rank}.safetensors", mine)
        optimizer = {"names": self._order, "param_groups": self._groups_of_one}
        return {"optimizer": optimizer, "scaler": self._scaler.state_dict(), "critic": None, "adapter": None}

    def _is_first(self, parameter: torch.Tensor) -> bool:
        return self.mesh.is_first(parameter) if isinstance(parameter, DTensor) else self.mesh.is_first_of("pipeline")

    def _load_weights(self, folder: Path, adapter: Mapping[str, torch.Tensor] | None) -> None:
        """Only this rank's part is read, if transformers' names for files are those of its modules."""
        if self.files is None:
            super()._load_weights(folder, adapter)
            return
        files = WeightFiles(folder)
        if wrong := sorted((self._whole.keys() ^ files.names) - {name.partition(".")[2] for name in self._same}):
            raise ValueError(f"{wrong[0]} is in one of the two alone")
        read_into(self._modules[0], files, self.model, self._same)

    def _own_weights(self, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: _as(tensor, saved[name]) for name, tensor in self.model.state_dict().items()}

    def _own_states(self, saved: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        own = {self._names[id(parameter)]: parameter for parameter in parameters}

        def part(name: str, value: Any) -> Any:
            return _as(own[name], value)

        if "names" in saved:
            files = sorted((folder / checkpoint.STAGES).glob("*.safetensors"))
            found = read_parts(files, own, part)
        else:  # of a plain rank
            whole = {self._order[place]: states for place, states in saved["state"].items()}
            found = {name: {key: part(name, whole[name][key]) for key in whole[name]} for name in own if name in whole}
        states = {place: found[name] for place, name in enumerate(own) if name in found}
        return {"state": states, "param_groups": self.optimizer.state_dict()["param_groups"]}


def _as(own: torch.Tensor, value: Any) -> Any:
    """This rank's part of a whole ``value`` [as ``own``], if ``own`` is divided over ranks; else ``value``."""
    if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
