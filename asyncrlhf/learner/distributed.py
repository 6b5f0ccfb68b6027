"""What the learner ranks say to each other: group set-up, sums and gathers that do nothing on a single rank."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Item = TypeVar("Item")


def init_process_group(
    rank: int, ranks: int, address: str, *, device: str = "cpu", timeout_seconds: float = 600
) -> None:
    """Join the learner's group: NCCL on CUDA, gloo elsewhere. ``address`` is ``host:port`` of rank 0."""
    dist.init_process_group(
        backend="nccl" if torch.device(device).type == "cuda" else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def all_sum(values: torch.Tensor, ranks: int) -> torch.Tensor:
    """``values`` added over all ranks, in place."""
    if ranks > 1:
        dist.all_reduce(values)
    return values


def all_gather(value: Any, ranks: int) -> list[Any]:
    """Each rank's picklable ``value``, in the order of the ranks."""
    if ranks == 1:
        return [value]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, value)
    return gathered


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
