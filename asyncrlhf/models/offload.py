"""Moves tensors off their device while another part works there, and back bit for bit: into the same tensors, so that
views, optimizers and sharded parameters stay valid."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

MADV_DONTNEED = 4  # Linux: frees the pages, which read as zeros until they are written again


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors on a device of that type, each once; of a sharded tensor the local shard."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().untyped_storage()
        if storage.device.type == device.type and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def free_cache(device: torch.device) -> None:
    """Return freed memory that the process caches to the device, or on a CPU to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


class Depot(Protocol):
    """Keeps the bytes of storages, each at its own place."""

    def take(self, storage: torch.UntypedStorage, place: int) -> None:
        """Keep the bytes and free their memory on the device."""

    def give(self, storage: torch.UntypedStorage, place: int, size: int) -> None:
        """Bring the ``size`` bytes back."""


class HostDepot:
    """Host memory, allocated at the first turn and kept, page-locked for a GPU. An offloaded storage has no bytes."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def take(self, storage: torch.UntypedStorage, place: int) -> None:
        flat = _flat(storage)
        if place not in self._held or len(self._held[place]) != len(flat):
            self._held[place] = torch.empty(len(flat), dtype=torch.uint8, pin_memory=flat.is_cuda)
        self._held[place].copy_(flat)
        storage.resize_(0)

    def give(self, storage: torch.UntypedStorage, place: int, size: int) -> None:
        storage.resize_(size)
        _flat(storage).copy_(self._held[place])


class FileDepot:
    """A disk as the depot of a CPU: an unnamed file, which ends with the process. An offloaded
    storage keeps its addresses without pages."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="asyncrlhf-offload-")  # noqa: SIM115
        self._advise: Any = getattr(ctypes.CDLL(None), "madvise", None)

    def take(self, storage: torch.UntypedStorage, place: int) -> None:
        start, size = storage.data_ptr(), storage.nbytes()
        self._file.seek(place)
        self._file.write(_bytes(storage))
        self._file.flush()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._advise is not None and last > first:
            self._advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)

    def give(self, storage: torch.UntypedStorage, place: int, size: int) -> None:
        self._file.seek(place)
        if self._file.readinto(_bytes(storage)) != size:  # type: ignore[attr-defined]
            raise OSError("the file that holds what was offloaded has become shorter")


class Offload:
    """The tensors of one part on ``device``. They must not be used between :meth:`out` and :meth:`back`."""

    def __init__(self, device: torch.device, depot: Depot | None = None) -> None:
        """``depot``: by default host memory for a GPU and a file for a CPU."""
        self._device, self._depot = device, depot
        self._away: dict[int, tuple[torch.UntypedStorage, int, int]] = {}  # with its place and bytes

    @property
    def asleep(self) -> bool:
        """Whether any tensor is offloaded."""
        return bool(self._away)

    def resident_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the tensors that are on the device now."""
        return sum(s.nbytes() for s in storages(tensors, self._device) if s._cdata not in self._away)

    def out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the tensors' storages off the device; does nothing if they are offloaded already."""
        if self._away:
            return
        if self._depot is None:
            self._depot = HostDepot() if self._device.type == "cuda" else FileDepot()
        place = 0
        for storage in list(storages(tensors, self._device)):
            if size := storage.nbytes():
                self._depot.take(storage, place)
                self._away[storage._cdata] = storage, place, size
                place += size
        free_cache(self._device)

    def back(self) -> None:
        """Bring everything back; does nothing if nothing is offloaded."""
        while self._away:
            key, (storage, place, size) = next(reversed(self._away.items()))
            assert self._depot is not None
            self._depot.give(storage, place, size)
            del self._away[key]


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """The same for files. A NumPy view would prevent later resizing of the storage."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
