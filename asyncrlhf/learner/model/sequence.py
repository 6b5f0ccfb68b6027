"""Ranks that share one batch: each computes a part of its tokens, and all ranks get all results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from asyncrlhf.learner.attention.attention import Layout, PackedLayout
from asyncrlhf.learner.attention.ring import RingPlan, plan_ring, ring_attention
from asyncrlhf.learner.attention.tiles import Scoring
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.ranks import Peers


class _Sum(torch.autograd.Function):
    """The sum over the group. All ranks compute the same from it, so that the gradient on one rank is that on all."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class SequenceParallel(ABC):
    """Splits packed inputs over ``peers``, the ranks that hold the same batch, and combines their results.

    Each rank's gradient is that of its own part: added up over the ranks, each token counts once.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    @abstractmethod
    def stretch(self, inputs: PackedInputs) -> tuple[PackedInputs, torch.Tensor]:
        """This rank's tokens, and which of the M predictions are made from them: [own] indices."""

    def together(self, part: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
        """[count] from each rank's values [own]."""
        return _Sum.apply(part.new_zeros(count).index_copy(0, own, part), self._peers.group)


def part_of(inputs: PackedInputs, own: torch.Tensor, **changes: Any) -> PackedInputs:
    """``inputs`` with the predictions ``own`` alone, and these ``changes``."""
    kept = None if inputs.kept is None else inputs.kept.at(own)
    return replace(inputs, targets=inputs.targets[own], kept=kept, **changes)


@dataclass(frozen=True, kw_only=True)
class _OnRing(Layout):
    """This rank's tokens of a packed batch; ``position_ids`` belong to them; a rank without tokens passes one, because
    a model cannot run on none."""

    plan: RingPlan
    peers: Peers

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        passed, own = query.shape[2], len(self.plan.rows)
        q, k, v = (x[:, :, :own] for x in (query, key, value))
        return F.pad(ring_attention(q, k, v, self.plan, self.peers, scoring), (0, 0, 0, 0, 0, passed - own))


class ContextParallel(SequenceParallel):
    """``learner.context_parallel_size``: each rank has stretches of the packed tokens in all layers, and attention uses
    the ring (``ring.py``). Heads are not divided, so any number of ranks is possible."""

    def stretch(self, inputs: PackedInputs) -> tuple[PackedInputs, torch.Tensor]:
        whole, device = inputs.layout, inputs.token_ids.device
        assert isinstance(whole, PackedLayout), "a stretch is cut of a whole batch"
        positions = whole.position_ids[0].cpu().numpy()
        plan = plan_ring(whole.spans.numpy(), positions, self._peers.rank, self._peers.ranks)
        mine = torch.from_numpy(plan.rows).to(device)
        here = torch.full((len(positions),), -1, device=device).index_copy_(0, mine, torch.arange(len(mine)).to(device))
        places = here[inputs.rows]
        own = torch.nonzero(places >= 0).squeeze(1)
        passed = mine if len(mine) else mine.new_zeros(1)
        routes = None if whole.routes is None else whole.routes[passed]
        layout = _OnRing(position_ids=whole.position_ids[:, passed], plan=plan, peers=self._peers, routes=routes)
        return part_of(inputs, own, token_ids=inputs.token_ids[:, passed], rows=places[own], layout=layout), own
