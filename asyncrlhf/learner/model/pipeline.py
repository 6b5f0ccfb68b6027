"""Pipeline parallelism: each rank has a run of the decoder layers, and hidden states go from rank to rank.

All ranks of a pipeline get the same batch, so each knows the shapes of the tensors that it receives: microbatches may
have any number of tokens, which torch's own stages do not support (docs/learners.md). Forward and backward passes
alternate as in 1F1B (Narayanan et al., 2104.04473): stage s of S has at most S - s microbatches under way. The last
stage sends the tokens' facts to all ranks, because every rank plans and records the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model.forward import PackedPolicy, TokenFacts
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import autocast
from asyncrlhf.learner.ranks import Part, Peers, Shards, whole
from asyncrlhf.learner.settings.model_fits import check_layers

Bounds = tuple[int, int]  # the first layer of a stage, and the one after its last


class _Elsewhere(nn.Module):
    """Replaces a decoder layer or a norm of another stage; returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # by which some families choose a mask
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def cut(model: transformers.PreTrainedModel, stage: int, stages: int) -> dict[str, int]:
    """Reduce ``model`` to the part of ``stage``, with unchanged names; returns the stage of each parameter.

    The first stage has the embeddings; the last one has the last norm and the output layer, with a copy of weights that
    are tied to the embeddings. Raises ConfigError for a model that is not built of ``layers`` and a ``norm``.
    """
    trunk: Any = model.base_model
    table: Any = model.get_input_embeddings()
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(getattr(trunk, "norm", None), nn.Module):
        raise ConfigError(
            f"learner.pipeline_parallel_size={stages}: a {type(model).__name__} cannot be cut into stages; "
            "allowed: decoder-only models of layers and a norm, as Llama and Qwen are."
        )
    check_layers(len(layers), stages)
    borders = [len(layers) * place // stages for place in range(stages + 1)]
    by_layer = [sum(place >= border for border in borders[1:]) for place in range(len(layers))]
    owners: dict[int, int] = {id(parameter): stages - 1 for parameter in model.parameters()}
    owners |= {id(parameter): 0 for parameter in table.parameters()}
    owners |= {id(p): place for place, layer in zip(by_layer, layers, strict=True) for p in layer.parameters()}
    found = {name: owners[id(parameter)] for name, parameter in model.named_parameters()}
    for place, layer in enumerate(layers):
        if by_layer[place] != stage:
            layers[place] = _Elsewhere(layer)
    if stage < stages - 1:
        trunk.norm = _Elsewhere(trunk.norm)
        model.set_output_embeddings(nn.Identity())
    if stage > 0:
        tied: Any = model.get_output_embeddings()
        if stage == stages - 1 and tied.weight is table.weight:
            tied.weight = nn.Parameter(tied.weight.detach().clone(), tied.weight.requires_grad)
        model.set_input_embeddings(nn.Identity())
    return found


@dataclass
class _Pass:
    """One microbatch on its way through this stage."""

    came: torch.Tensor | None  # [1, K, H] from the stage before
    hidden: torch.Tensor  # [K, H]


class Stage(nn.Module):
    """One rank's part of a ``PackedPolicy``, called in the same way by all ranks of the pipeline together."""

    def __init__(
        self, policy: PackedPolicy, peers: Peers, pipelines: list[list[int]], dtype: torch.dtype | None
    ) -> None:
        """``policy``: with all layers; its model is cut here. ``pipelines``: the ranks of each. ``dtype``: of the
        passes, or None for float32."""
        super().__init__()
        table: Any = policy.model.get_input_embeddings().weight
        self.width = int(table.shape[1])
        self.owners = cut(policy.model, peers.rank, peers.ranks)
        self.policy, self.peers, self._dtype = policy, peers, dtype
        self.autocast: torch.dtype | None = None  # where the weights do not have this type themselves
        self.first, self.last = peers.rank == 0, peers.rank == peers.ranks - 1
        # One group per direction: NCCL runs a group's operations in order, and one direction must not wait for another.
        self._down, self._up, self._said = (dist.new_subgroups_by_enumeration(pipelines)[0] for _ in range(3))
        self._begun: dict[int, _Pass] = {}
        self._open: _Pass | None = None  # the newest whose facts were requested
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def begin(self, inputs: PackedInputs) -> None:
        """Run the layers of this stage; :meth:`forward` does the rest."""
        self._begun[id(inputs)] = self._through(inputs)

    def forward(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        passed = self._begun.pop(id(inputs), None) or self._through(inputs)
        self._open = passed if torch.is_grad_enabled() else None
        last, policy = self.peers.ranks - 1, self.policy
        if self.last:
            hidden = passed.hidden.index_select(0, inputs.rows)
            hidden = hidden if self._dtype is None else hidden.to(self._dtype)
            with autocast(hidden.device, self.autocast):
                facts = policy.of_hidden(hidden, inputs.targets, temperature, inputs.kept)
            for other in range(last):
                self._send(facts.stacked().detach().float(), other, self._said)
            return facts
        kinds = 2 + policy.collision + (inputs.kept is not None)
        said = self._receive((kinds, len(inputs.rows)), last, self._said)
        return TokenFacts.unstacked(said, inputs.kept is not None)

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients of the microbatch whose facts were requested last; only the last stage uses ``loss``."""
        passed, self._open = self._open, None
        assert passed is not None
        if self.last:
            loss.backward()
        else:
            passed.hidden.backward(self._receive(tuple(passed.hidden.shape), self.peers.rank + 1, self._up))
        if passed.came is not None:
            grad = passed.came.grad
            self._send(torch.zeros_like(passed.came) if grad is None else grad, self.peers.rank - 1, self._up)

    def settle(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _through(self, inputs: PackedInputs) -> _Pass:
        count, came, given = inputs.token_ids.shape[1], None, {"input_ids": inputs.token_ids}
        if not self.first:
            came = self._receive((1, count, self.width), self.peers.rank - 1, self._down)
            came.requires_grad_(torch.is_grad_enabled())
            given = {"inputs_embeds": came if self._dtype is None else came.to(self._dtype)}
        places, layout = inputs.layout.position_ids, inputs.layout
        with autocast(inputs.token_ids.device, self.autocast):
            trunk: Any = self.policy.model.base_model
            found = trunk(position_ids=places, packed_layout=layout, use_cache=False, **given)
        hidden = found.last_hidden_state[0].float()
        if not self.last:
            self._send(hidden.detach(), self.peers.rank + 1, self._down)
        return _Pass(came, hidden)

    def _send(self, tensor: torch.Tensor, place: int, group: Any) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        whole = tensor.contiguous()
        work = dist.isend(whole, group=group, group_dst=place)
        assert work is not None
        self._sent.append((work, whole))

    def _receive(self, shape: tuple[int, ...], place: int, group: Any) -> torch.Tensor:
        device = next(self.policy.model.parameters()).device
        room = torch.empty(shape, device=device)
        dist.recv(room, group=group, group_src=place)
        return room


class StageShards(Shards):
    """Tensors of all stages: each belongs to one stage, which sends it to all ranks while a piece is gathered."""

    def __init__(self, stage: Stage, whole: Mapping[str, torch.Tensor]) -> None:
        """``whole``: :meth:`layout`."""
        super().__init__(stage.policy.model)
        self._stage, self._whole = stage, whole

    def layout(self) -> Mapping[str, torch.Tensor]:
        return self._whole

    @contextmanager
    def gather(self, names: tuple[str, ...]) -> Iterator[Mapping[str, torch.Tensor]]:
        own, peers = dict(self._model.named_parameters()), self._stage.peers
        device = next(self._model.parameters()).device
        tensors = {}
        for name in names:
            owner = self._stage.owners[name]
            here = owner == peers.rank
            tensors[name] = whole(own[name]) if here else torch.empty_like(self._whole[name], device=device)
            dist.broadcast(tensors[name], group=peers.group, group_src=owner)
        yield tensors

    def parts(self) -> dict[str, Part]:
        own = dict(self._model.named_parameters())
        mine = [name for name in self._whole if self._stage.owners[name] == self._stage.peers.rank]
        return {name: self._part(name, own[name]) for name in mine}


def one_forward_one_backward(stage: Stage, inputs: Sequence[PackedInputs | None]) -> Iterator[int]:
    """The indices of ``inputs`` in order; before each, this stage starts as many as keep the later stages busy. An
    input that is None is not started ahead."""
    begun = 0
    for place in range(len(inputs)):
        while begun < min(len(inputs), place + stage.peers.ranks - stage.peers.rank):
            given = inputs[begun]
            if given is not None:
                stage.begin(given)
            begun += 1
        yield place
