"""Buckets in memory that other processes of the same user on the same machine can map, and how they do it.

The memory has no name in any folder and is freed with the last process that holds it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
from itertools import accumulate

import torch

from asyncrlhf.transport.manifest import FlatBuckets
from asyncrlhf.types import WeightManifest

Place = tuple[str, int, int]  # the memory's name, a process that holds it, and its file descriptor there


def host_identity() -> str:
    """A text that two processes share only if one may map the other's memory: the same machine since its start, the
    same process numbers (containers have their own) and the same user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


class SharedBuckets(FlatBuckets):
    """``FlatBuckets`` that others map at ``place``."""

    def __init__(self, manifest: WeightManifest) -> None:
        name = f"asyncrlhf-{secrets.token_hex(8)}"
        self._file = os.memfd_create(name)
        os.ftruncate(self._file, max(1, sum(manifest.bucket_bytes)))
        super().__init__(manifest, tensors=_slices(mmap.mmap(self._file, 0), manifest))
        self.place: Place = (name, os.getpid(), self._file)

    def close(self) -> None:
        """No process can map it any more; one that has mapped it keeps it."""
        os.close(self._file)


def open_buckets(place: Place, manifest: WeightManifest) -> list[torch.Tensor]:
    """The buckets at ``place``, uint8 [bytes] each; OSError if that memory cannot be mapped."""
    name, process, number = place
    path = f"/proc/{process}/fd/{number}"
    if os.readlink(path).removesuffix(" (deleted)") != f"/memfd:{name}":
        raise FileNotFoundError(f"{path} is another file")
    with open(path, "rb") as file:
        # A private mapping: a stray write reaches neither the sender nor the other receivers.
        return _slices(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), manifest)


def _slices(memory: mmap.mmap, manifest: WeightManifest) -> list[torch.Tensor]:
    """The buckets, consecutive; uint8 [bytes] each."""
    sizes = manifest.bucket_bytes
    starts = accumulate((0, *sizes))
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start) if size else torch.empty(0).byte()
        for start, size in zip(starts, sizes, strict=False)
    ]
