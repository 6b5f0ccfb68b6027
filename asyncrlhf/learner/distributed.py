"""What the learner ranks say to each other: group set-up, sums and gathers that do nothing on a single rank."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")


def init_process_group(
    rank: int, ranks: int, address: str, *, device: str = "cpu", timeout_seconds: float = 600
) -> None:
    """Join the learner's group: gloo, and NCCL for tensors on CUDA. ``address`` is ``host:port`` of rank 0."""
    dist.init_process_group(
        backend=_backend(device),
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def init_single_process_group(device: str | torch.device) -> None:
    """A group of this process alone, for libraries that ask for one; nothing when there is a group already."""
    if not dist.is_initialized():
        dist.init_process_group(backend=_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: str | torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


@dataclass(frozen=True)
class Peers:
    """Ranks that do something together; ``rank`` is this one's place among them. No ``group``: all ranks."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None


def deal_out(rank: int, ranks: int, size: int) -> tuple[Peers, Peers]:
    """(data-parallel group, sequence-parallel group): runs of ``size`` ranks have the same data. All ranks call it
    together."""
    if size == 1:
        return Peers(rank, ranks), Peers()
    across = [dist.new_group(list(range(place, ranks, size))) for place in range(size)]
    within = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    share, place = divmod(rank, size)
    return Peers(share, ranks // size, across[place]), Peers(place, size, within[share])


def all_sum(values: torch.Tensor, peers: Peers) -> torch.Tensor:
    """``values`` added over the peers, in place."""
    if peers.ranks > 1:
        dist.all_reduce(values, group=peers.group)
    return values


def all_gather(value: Any, peers: Peers) -> list[Any]:
    """Each peer's picklable ``value``, in the order of their ranks."""
    if peers.ranks == 1:
        return [value]
    gathered: list[Any] = [None] * peers.ranks
    dist.all_gather_object(gathered, value, group=peers.group)
    return gathered


def padded(items: Sequence[Item], device: torch.device, ranks: int) -> list[Item | None]:
    """``items``, and behind them as many None as the rank with the most items has more: all ranks make equally many
    passes where each is collective."""
    if ranks == 1:
        return list(items)
    longest = torch.tensor(len(items), device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return [*items, *([None] * (int(longest) - len(items)))]


def barrier(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()
