"""Transport between processes that share one GPU: the snapshot is in the learner's memory there, receivers open it by
CUDA IPC handles, as vLLM's own ``ipc`` engine does, and their engines copy it on the device; nothing is sent."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.sender import Wire
from asyncrlhf.transport.shared_memory import MappedReceiver, MappedSender
from asyncrlhf.types import WeightManifest

# Positions in the arguments that rebuild a tensor: of the device's index, which may differ by process; and of the name
# of the file in which torch counts who has the memory open.
_DEVICE, _COUNTS = 6, 11
_INT = 4  # bytes of C's int


def export_bucket(bucket: torch.Tensor) -> tuple[Any, ...]:
    """The handle with which another process opens the memory."""
    handle = tuple(reduce_tensor(bucket)[1])
    if handle[_COUNTS] is not None:
        _remove_name(handle[_COUNTS].decode())
    return handle


def _remove_name(name: str) -> None:
    """Remove torch's file of counts from /dev/shm: torch does so when this process ends by itself, but nothing would
    after a process that is killed, as Ray ends its actors.

    Nothing needs the name. The counts say when the memory may be freed, and the buckets stay as long as this process;
    a receiver that cannot find its count goes on (``THPStorage_releaseIPCCounter`` in torch's StorageSharing.cpp). But
    the file begins with the number of processes that have it open, and the last one to close it aborts if the name is
    gone (``RefcountedMapAllocator::close``). Therefore one is added that never closes it.
    """
    with suppress(FileNotFoundError), open(f"/dev/shm{name}", "r+b", buffering=0) as file:
        if int.from_bytes(file.read(_INT), sys.byteorder) == 1:  # else it is not as described
            file.seek(0)
            file.write((2).to_bytes(_INT, sys.byteorder))
            os.unlink(file.name)


def open_bucket(handle: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The sender's memory, uint8 [bytes]."""
    index = torch.cuda.current_device() if device.index is None else device.index
    rebuild: Callable[..., torch.Tensor] = rebuild_cuda_tensor
    return rebuild(*handle[:_DEVICE], index, *handle[_DEVICE + 1 :])


def card(device: torch.device) -> str:
    """The name that a GPU has in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def finish(device: torch.device) -> None:
    """Wait until the GPU has done all that this process has asked of it."""
    torch.cuda.synchronize(device)


@contextmanager
def _sharing(who: str) -> Iterator[None]:
    """CUDA's error as one sentence: some containers and systems cannot share memory of a GPU between processes."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise WeightSyncError(
            f"{who} by CUDA IPC ({reason}); allowed on this machine: weights.transport=collective."
        ) from error


class CudaIpcSender(MappedSender):
    """A ticket names the GPU and carries a handle for each bucket, made once."""

    def __init__(self, manifest: WeightManifest, device: torch.device | str, wire: Wire | None = None) -> None:
        super().__init__(manifest, device, wire)
        self._name, self._card = secrets.token_hex(8), card(torch.device(device))
        with _sharing("The learner cannot offer its weights"):
            self._handles = tuple(export_bucket(bucket) for bucket in self.buckets.tensors)

    def _refs(self, version: int) -> tuple[Any, ...]:
        return self._name, self._card, self._handles


class CudaIpcReceiver(MappedReceiver):
    """Opens the sender's memory on the GPU; stages nothing: the engine loads from there. Raises WeightSyncError on
    another GPU."""

    def loaded(self) -> None:
        """An engine's copies may still be queued on the GPU when its load returns, and the sender, another process,
        overwrites their source after the last receiver's answer."""
        finish(self._device)

    def _open(self, ticket: Ticket) -> list[torch.Tensor]:
        _, theirs, handles = ticket.refs
        own = card(self._device)
        if own != theirs:
            raise WeightSyncError(
                f"{self._staged.name} works on GPU {own}, the learner on {theirs}; weights.transport=cuda_ipc "
                "needs both on one."
            )
        with _sharing(f"{self._staged.name} cannot open the learner's weights"):
            return [open_bucket(handle, self._device) for handle in handles]
