"""Buckets that are fetched when they are read: no process holds weights whole that are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncrlhf.transport.manifest import FlatBuckets, ShardedParams, view_of
from asyncrlhf.types import WeightManifest


class GatheredBuckets(FlatBuckets):
    """Buckets of sharded weights that are too large for one process: each is fetched when it is read, and exists until
    its reader releases it."""

    def __init__(self, params: ShardedParams, manifest: WeightManifest, device: torch.device | str = "cpu") -> None:
        self.manifest, self.device, self._params = manifest, torch.device(device), params
        self.tensors = _Fetched(self)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return ()

    def views(self) -> Mapping[str, torch.Tensor]:
        """As of :class:`FlatBuckets`; of the buckets only the one that was read last exists."""
        return _FetchedViews(self)

    def copy_from(self, params: Mapping[str, torch.Tensor], cast: torch.dtype | None = None) -> None:
        """Does nothing: the values taken last are the content."""

    def moved(self, device: torch.device) -> GatheredBuckets:
        return GatheredBuckets(self._params, self.manifest, device)

    def fetch(self, bucket: int) -> torch.Tensor:
        """uint8 [bytes]."""
        room = torch.zeros(self.manifest.bucket_bytes[bucket], dtype=torch.uint8, device=self.device)
        self._params.fetch(bucket, room)
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
