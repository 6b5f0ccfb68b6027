"""Flat byte buckets: the place of each tensor, zero-copy views, fast copies into them, and their checksums.

Weights that are sharded over the learner's ranks are given by name and shape, and fetched one bucket at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.types import TensorEntry, WeightManifest


class ShardedParams(Mapping[str, torch.Tensor], ABC):
    """Used instead of a sender's parameters where no rank holds them whole: tensors without values (on ``meta``), and
    copies of their values, which the sender fetches one bucket at a time."""

    def __init__(self, layout: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """``device``: that of the copies."""
        self._layout, self.device = dict(layout), torch.device(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._layout[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    @abstractmethod
    def take(self) -> None:
        """Copy the present values; returns when they may change again."""

    @abstractmethod
    def fetch(self, bucket: int, room: torch.Tensor, ago: int = 0) -> None:
        """Write a bucket of the values taken last into ``room``, uint8 [bytes] on any device; with ``ago`` 1 of those
        taken before, if it keeps them."""


def entries_by_bucket(manifest: WeightManifest) -> list[list[TensorEntry]]:
    """The entries of each bucket, in the manifest's order."""
    found: list[list[TensorEntry]] = [[] for _ in manifest.bucket_bytes]
    for entry in manifest.tensors:
        found[entry.bucket].append(entry)
    return found


ALIGNMENT = 16  # bytes; every dtype of torch can be viewed at such an offset
COPY_PIECE_BYTES = 8 << 20  # small enough to share the work evenly, large enough that the cost of a call is negligible


def build_manifest(
    params: Mapping[str, torch.Tensor], bucket_bytes: int, cast: torch.dtype | None = None
) -> WeightManifest:
    """Lay out ``params`` in order, each at a 16-byte boundary, in buckets of at most ``bucket_bytes`` bytes.

    Reads names, shapes and dtypes, no values. Floating tensors are sent as ``cast`` if it is given. A tensor larger
    than a bucket gets its own bucket. Raises WeightSyncError when there are no parameters.
    """
    if not params:
        raise WeightSyncError("There are no parameters to publish.")
    entries: list[TensorEntry] = []
    sizes = [0]
    for name, tensor in params.items():
        dtype = cast if cast is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = -(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if sizes[-1] and sizes[-1] + nbytes > bucket_bytes:
            sizes.append(0)
        text = str(dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, tuple(tensor.shape), text, len(sizes) - 1, sizes[-1]))
        sizes[-1] += nbytes
    return WeightManifest(tuple(entries), tuple(sizes))


def manifest_digest(manifest: WeightManifest) -> str:
    """A short text that is the same for the same layout, in every process."""
    return hashlib.blake2b(repr(manifest).encode(), digest_size=16).hexdigest()


def manifest_difference(expected: WeightManifest, given: WeightManifest) -> str | None:
    """The first difference of two layouts, as half a sentence; None if they are the same."""
    elsewhere = "the same tensors lie elsewhere in the buckets"
    return tensor_difference(expected, given) or (None if expected == given else elsewhere)


def tensor_difference(expected: WeightManifest, given: WeightManifest) -> str | None:
    """As :func:`manifest_difference`, but ignores the tensors' places."""
    wanted = {entry.name: entry for entry in expected.tensors}
    offered = {entry.name: entry for entry in given.tensors}
    for name, entry in wanted.items():
        other = offered.get(name)
        if other is None:
            return f"tensor {name!r} is missing"
        if (other.shape, other.dtype) != (entry.shape, entry.dtype):
            return f"tensor {name!r} is {other.dtype}{list(other.shape)}, not {entry.dtype}{list(entry.shape)}"
    return next((f"tensor {name!r} is unknown" for name in offered if name not in wanted), None)


def view_of(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    """One tensor as a view on the memory of its bucket (uint8 [bytes])."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    nbytes = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
    return bucket[entry.offset : entry.offset + nbytes].view(dtype).view(entry.shape)


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A CPU tensor's bytes [numel * itemsize]; a view where the tensor is contiguous."""
    flat: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


class FlatBuckets:
    """Memory for one whole set of weights. ``tensors``: uint8 [bytes], one for each bucket of the manifest."""

    def __init__(
        self, manifest: WeightManifest, device: torch.device | str = "cpu", *, pin_memory: bool = False,
        tensors: list[torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """``tensors``: existing memory to use."""
        self.manifest, self._pinned = manifest, pin_memory
        self.device = torch.device(device)
        # Zeroed, not empty: the pages are touched here, so that the first copy is as quick as the later ones.
        self.tensors: Sequence[torch.Tensor] = tensors or [
            torch.zeros(size, dtype=torch.uint8, device=self.device, pin_memory=pin_memory)
            for size in manifest.bucket_bytes
        ]
        self._views = {entry.name: view_of(entry, self.tensors[entry.bucket]) for entry in manifest.tensors}

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The tensors that are there between two transfers."""
        return self.tensors

    def views(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name, as views on the buckets."""
        return dict(self._views)

    def copy_from(self, params: Mapping[str, torch.Tensor], cast: torch.dtype | None = None) -> None:
        """Copy in every tensor's present value, with torch's intra-op thread count; returns when the copies are done.

        ``cast``: the manifest's. Raises WeightSyncError naming the first tensor that is missing, unknown, or of another
        shape or dtype.
        """
        difference = tensor_difference(self.manifest, build_manifest(params, 1, cast))
        if difference is not None:
            raise WeightSyncError(f"The parameters do not fit the manifest: {difference}.")
        if isinstance(params, ShardedParams):
            for bucket, memory in enumerate(self.tensors):
                params.fetch(bucket, memory)
        else:
            copy_tensors(self._views, params)

    def another(self) -> FlatBuckets:
        """Memory of the same kind with other content."""
        return FlatBuckets(self.manifest, self.device, pin_memory=self._pinned)

    def moved(self, device: torch.device) -> FlatBuckets:
        """The same content on another device; on a CPU in page-locked memory."""
        other = FlatBuckets(self.manifest, device, pin_memory=device.type == "cpu")
        other.copy_buckets(self.tensors)
        return other

    def copy_buckets(
        self, buckets: Sequence[torch.Tensor | NDArray[np.uint8]], indices: Sequence[int] | None = None
    ) -> None:
        """Overwrite the buckets ``indices`` (default: all); raises WeightSyncError when the sizes differ."""
        chosen = range(len(self.tensors)) if indices is None else indices
        sizes = [len(bucket) for bucket in buckets]
        wanted = [self.manifest.bucket_bytes[index] for index in chosen]
        if sizes != wanted:
            raise WeightSyncError(f"Buckets of {sizes} bytes do not fit a manifest of {wanted} bytes.")
        for index, other in zip(chosen, buckets, strict=True):
            if isinstance(other, torch.Tensor):
                self.tensors[index].copy_(other)
            else:
                np.copyto(self.tensors[index].numpy(), other)


@torch.no_grad()
def copy_tensors(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Copy each source into its target, cast to the target's dtype; returns when the copies are done."""
    pieces: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    for name, target in targets.items():
        source = sources[name].detach()
        if source.device.type == "cpu" and target.device.type == "cpu" and source.dtype == target.dtype:
            to, of = as_bytes(target), as_bytes(source)
            starts = range(0, len(to), COPY_PIECE_BYTES)
            pieces.extend((to[i : i + COPY_PIECE_BYTES], of[i : i + COPY_PIECE_BYTES]) for i in starts)
        else:
            target.copy_(source, non_blocking=True)
    copy_pieces(pieces, torch.get_num_threads())
    if any(sources[name].device.type == "cuda" or target.device.type == "cuda" for name, target in targets.items()):
        torch.cuda.current_stream().synchronize()


def copy_pieces(pieces: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], threads: int) -> None:
    """Copy (target, source) pairs. NumPy's copy is a plain memcpy without the GIL: measured 1.4 times ``Tensor.copy_``,
    and a pool of threads does not spin on busy cores as OpenMP's barrier does.
    """
    total = sum(target.nbytes for target, _ in pieces)
    if threads == 1 or total <= COPY_PIECE_BYTES:
        for target, source in pieces:
            np.copyto(target, source)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda share: copy_pieces(share, 1), [pieces[i::threads] for i in range(threads)]))


CHUNK_WORDS = 1 << 20  # of 8 bytes: bounds the memory of a sum on an accelerator
_MASK = (1 << 64) - 1
_FACTOR = 6364136223846793005  # odd, so that no chunk is lost in the product; below 2^63 for int64


def bucket_checksum(entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> int:
    """64 bits over the bytes of a bucket's tensors in order, without the gaps between them.

    On the host XXH3 (measured 17 GB/s on one core, against 2.3 of zlib's CRC-32), which runs without the GIL. On an
    accelerator, from which the bytes would have to be copied first, a positional sum computed there.
    """
    if any(tensors[entry.name].device.type != "cpu" for entry in entries):
        total = 0
        for entry in entries:
            total = (total * _FACTOR + positional_sum(tensors[entry.name])) & _MASK
        return total
    digest = xxhash.xxh3_64()
    for entry in entries:
        digest.update(as_bytes(tensors[entry.name]).data)
    return digest.intdigest()


@torch.no_grad()
def positional_sum(tensor: torch.Tensor) -> int:
    """Sum modulo 2^64 of a tensor's 8-byte words, each times an odd weight of its place; equal on every device.

    A multilinear hash (Carter and Wegman, "Universal classes of hash functions"): a changed word always changes it,
    exchanged ones nearly always. ``tensor`` begins at a multiple of 8 bytes of its storage, as in a bucket.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    places = torch.arange(CHUNK_WORDS, dtype=torch.int64, device=flat.device)
    weights = places * 2862933555777941757 + 3037000493  # Knuth's MMIX constants for a linear congruence
    weights = (weights ^ (weights >> 29)) | 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunks = flat[:whole].view(torch.int64).split(CHUNK_WORDS) if whole else ()
    for words in (*chunks, flat[whole:].to(torch.int64)):
        total = total * _FACTOR + (words * weights[: len(words)]).sum()
    return int(total) & _MASK


def manifest_checksums(manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """One checksum per bucket."""
    return tuple(bucket_checksum(entries, tensors) for entries in entries_by_bucket(manifest))


def changed_buckets(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The buckets whose checksum differs; all of them if the old checksums are unknown."""
    if len(old) != len(new):
        return list(range(len(new)))
    return [i for i, (before, after) in enumerate(zip(old, new, strict=True)) if before != after]


class GatheredBuckets(FlatBuckets):
    """Buckets of sharded weights that are too large for one process: each is fetched when it is read, and exists until
    its reader releases it."""

    def __init__(
        self, params: ShardedParams, manifest: WeightManifest, device: torch.device | str = "cpu", ago: int = 0
    ) -> None:
        """``ago``: as of :meth:`ShardedParams.fetch`."""
        self.manifest, self.device, self._params, self._ago = manifest, torch.device(device), params, ago
        self.tensors = _Fetched(self)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return ()

    def views(self) -> Mapping[str, torch.Tensor]:
        """As of :class:`FlatBuckets`; of the buckets only the one that was read last exists."""
        return _FetchedViews(self)

    def copy_from(self, params: Mapping[str, torch.Tensor], cast: torch.dtype | None = None) -> None:
        """Does nothing: the values taken last are the content."""

    def another(self) -> GatheredBuckets:
        """The values taken before."""
        return GatheredBuckets(self._params, self.manifest, self.device, 1)

    def moved(self, device: torch.device) -> GatheredBuckets:
        return GatheredBuckets(self._params, self.manifest, device, self._ago)

    def fetch(self, bucket: int) -> torch.Tensor:
        """uint8 [bytes]."""
        room = torch.zeros(self.manifest.bucket_bytes[bucket], dtype=torch.uint8, device=self.device)
        self._params.fetch(bucket, room, self._ago)
        return room


class _Fetched(Sequence[torch.Tensor]):
    def __init__(self, buckets: GatheredBuckets) -> None:
        self._buckets = buckets

    def __len__(self) -> int:
        return len(self._buckets.manifest.bucket_bytes)

    def __getitem__(self, bucket: Any) -> Any:
        return self._buckets.fetch(range(len(self))[bucket])


class _FetchedViews(Mapping[str, torch.Tensor]):
    def __init__(self, buckets: GatheredBuckets) -> None:
        self._buckets = buckets
        self._entries = {entry.name: entry for entry in buckets.manifest.tensors}
        self._last: tuple[int, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        if self._last is None or self._last[0] != entry.bucket:
            self._last = None  # released before the next one is fetched
            self._last = entry.bucket, self._buckets.fetch(entry.bucket)
        return view_of(entry, self._last[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
