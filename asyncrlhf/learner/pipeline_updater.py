"""Updates of a policy whose decoder layers are on several ranks, see ``pipeline.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from asyncrlhf.learner.distributed import Peers, Shards, all_sum
from asyncrlhf.learner.forward import PackedPolicy
from asyncrlhf.learner.optimizers import build_optimizer
from asyncrlhf.learner.passes import AUTOCAST
from asyncrlhf.learner.pipeline import Stage, StageShards, one_forward_one_backward
from asyncrlhf.learner.plan import Microbatch
from asyncrlhf.learner.state_writer import StateWriter
from asyncrlhf.learner.updaters import TorchUpdater


class PipelineUpdater(TorchUpdater):
    """``learner.pipeline_parallel_size``: all ranks are the stages of one pipeline, and have the same batch.

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
        self._peers = Peers(dist.get_rank(), self.ranks)
        self._ends = Peers(self._peers.rank, 2, dist.new_group([0, self.ranks - 1]))
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
        stage = Stage(policy, self._peers, AUTOCAST.get(self.config.mixed_precision))
        nn.Module.to(policy.model, self.device)
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

    def clip(self, module: nn.Module) -> torch.Tensor:
        self.policy.settle()
        trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
        if self._tied and (self.policy.first or self.policy.last):
            table: Any = self._copy if self._copy is not None else self.model.get_input_embeddings().weight
            assert table.grad is not None
            all_sum(table.grad, self._ends)
        own = [parameter.grad for parameter in trained if parameter is not self._copy and parameter.grad is not None]
        norm = all_sum(nn.utils.get_total_norm(own).square(), self._peers).sqrt()
        nn.utils.clip_grads_with_norm_(trained, self.config.max_grad_norm or math.inf, norm)
        return norm

    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        """Write the state as one plain rank would: other stages' parts come through host memory."""
        mine = {
            self._names[id(parameter)]: {
                key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in states.items()
            }
            for parameter, states in self.optimizer.state.items()
            if parameter is not self._copy
        }
        parts: list[Any] | None = [None] * self.ranks if rank == 0 else None
        dist.gather_object(mine, parts)
        found = {name: states for part in parts or [] for name, states in part.items()}
        states = {place: found[name] for place, name in enumerate(self._order) if name in found}
        optimizer = {"state": states, "param_groups": self._groups_of_one}
        return {"optimizer": optimizer, "scaler": self._scaler.state_dict(), "critic": None, "adapter": None}

    def _own_weights(self, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: saved[name] for name in self.model.state_dict()}

    def _own_states(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        by_name = dict(enumerate(self._order))
        found = {by_name[place]: states for place, states in saved["state"].items()}
        groups = self.optimizer.state_dict()["param_groups"]
        own = [self._names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]
        return {"state": {i: found[name] for i, name in enumerate(own) if name in found}, "param_groups": groups}
