"""What the learner ranks say to each other: group set-up, sums and gathers that do nothing on a single rank."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

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


def all_max(value: int, device: torch.device, ranks: int) -> int:
    """The largest ``value`` of all ranks."""
    if ranks == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


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
    longest = all_max(len(items), device, ranks)
    return [*items, *([None] * (longest - len(items)))]


def device_mesh(device: torch.device, ranks: int) -> DeviceMesh:
    """All ranks in a row."""
    init_single_process_group(device)
    return init_device_mesh(device.type, (ranks,))


def barrier(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def data_parallel(module: nn.Module, ranks: int) -> nn.Module:
    """``module`` with its gradients averaged over ranks, or itself on a single one."""
    return module if ranks == 1 else DistributedDataParallel(module, broadcast_buffers=False)


def reducing(module: nn.Module, microbatches: Sequence[Item]) -> Iterator[Item]:
    """The microbatches, with the gradient reduction held back until the last one.

    Every rank must reduce exactly once however many microbatches it has.
    """
    for index, microbatch in enumerate(microbatches):
        with contextlib.ExitStack() as stack:
            if isinstance(module, DistributedDataParallel) and index < len(microbatches) - 1:
                stack.enter_context(module.no_sync())
            yield microbatch
