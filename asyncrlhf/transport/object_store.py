"""Transport through Ray's object store: a ticket carries references to the buckets, receivers fetch them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.base import Ticket, TransferStats
from asyncrlhf.transport.local import staging_for
from asyncrlhf.transport.manifest import FlatBuckets
from asyncrlhf.transport.snapshot import SnapshotHolder
from asyncrlhf.types import WeightManifest


class ObjectStoreSender(SnapshotHolder):
    """Needs a running Ray. ``ticket`` copies the snapshot into the store; Ray keeps it as long as the ticket lives."""

    def __init__(self, manifest: WeightManifest, device: torch.device | str = "cpu") -> None:
        super().__init__(manifest, device)
        self._newest_ticket: Ticket | None = None
        self._put_seconds = 0.0

    def listen(self, host: str = "") -> str:
        return ""

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        with self.lock:
            self.epoch = epoch

    def prepare(self) -> None:
        self._newest_ticket = None

    def ticket(self) -> Ticket:
        import ray

        self.settle()
        with self.lock:
            version, known = self._newest(), self._newest_ticket
            if known is None or (known.version, known.epoch) != (version, self.epoch):
                started = time.perf_counter()
                refs = tuple(ray.put(bucket.cpu().numpy()) for bucket in self.buckets.tensors)
                self._put_seconds = time.perf_counter() - started
                known = self._newest_ticket = Ticket(version, self.epoch, self.manifest, refs)
            return known

    def transfer(self, ticket: Ticket) -> TransferStats:
        """The store is filled by ``ticket``; ``seconds`` is what that took. A receiver has the weights when its
        ``receive`` returns, and Ray itself reports one that died.
        """
        with self.lock:
            self.check_current(ticket)
            return TransferStats(self._put_seconds, self.manifest.total_bytes, self.stall_seconds)

    def close(self) -> None:
        self._newest_ticket = None


class ObjectStoreReceiver:
    """Reads the store's memory without a copy on the way and copies it into staging memory of its own.

    The copy frees the store early, and an engine that loads in place cannot write into shared memory.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._staging: FlatBuckets | None = None

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """The object store needs no group."""

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        import ray

        self._staging = staging_for(ticket.manifest, self._staging)
        try:
            arrays = ray.get(list(ticket.refs), timeout=self._timeout_seconds)
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"Weights of version {ticket.version} could not be fetched from the object store within "
                f"{self._timeout_seconds:g} s: {type(error).__name__}."
            ) from error
        self._staging.copy_buckets(arrays)
        return self._staging.views()

    def close(self) -> None:
        self._staging = None
