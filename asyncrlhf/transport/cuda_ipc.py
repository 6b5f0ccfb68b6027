"""Transport between processes that share one GPU: the snapshot is in the learner's memory there, receivers open it by
CUDA IPC handles, as vLLM's own ``ipc`` engine does, and their engines copy it on the device; nothing is sent."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.sender import Wire
from asyncrlhf.transport.shared_memory import MappedReceiver, MappedSender
from asyncrlhf.types import WeightManifest

_DEVICE = 6  # position of the device's index in the arguments that rebuild a tensor: it may differ by process


def export_bucket(bucket: torch.Tensor) -> tuple[Any, ...]:
    """The handle with which another process opens the memory."""
    return tuple(reduce_tensor(bucket)[1])


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
