"""Transport inside one process: a ticket carries the snapshot by reference, a receiver copies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.base import Ticket, TransferStats
from asyncrlhf.transport.manifest import FlatBuckets, manifest_difference
from asyncrlhf.transport.snapshot import SnapshotHolder
from asyncrlhf.types import WeightManifest


class LocalSender(SnapshotHolder):
    """Each snapshot has memory of its own, so that a ticket stays good however late it is used."""

    def listen(self, host: str = "") -> str:
        return ""

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        self.epoch = epoch

    def prepare(self) -> None:
        self.buckets = FlatBuckets(self.manifest)

    def ticket(self) -> Ticket:
        self.settle()
        with self.lock:
            return Ticket(self._newest(), self.epoch, self.manifest, (self.buckets,))

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Nothing travels before a receiver copies; the receivers may live in the calling thread."""
        return TransferStats(0.0, self.manifest.total_bytes, self.stall_seconds)

    def close(self) -> None:
        """Nothing is held open."""


class LocalReceiver:
    """Copies the snapshot into staging memory of its own."""

    def __init__(self) -> None:
        self._staging: FlatBuckets | None = None

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """A local receiver needs no group."""

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        self._staging = staging_for(ticket.manifest, self._staging)
        (source,) = ticket.refs
        difference = manifest_difference(ticket.manifest, source.manifest)
        if difference is not None:
            raise WeightSyncError(f"Version {ticket.version} does not fit its ticket's manifest: {difference}.")
        self._staging.copy_buckets(source.tensors)
        return self._staging.views()

    def close(self) -> None:
        self._staging = None


def staging_for(
    manifest: WeightManifest, staging: FlatBuckets | None, device: torch.device | str = "cpu"
) -> FlatBuckets:
    """``staging`` itself, or new memory the first time. Raises WeightSyncError when the layout is another one: a run
    publishes one model, so that a changed layout is somebody's mistake.
    """
    if staging is None:
        return FlatBuckets(manifest, device)
    difference = manifest_difference(staging.manifest, manifest)
    if difference is not None:
        raise WeightSyncError(f"The ticket's manifest is not the one of this run: {difference}.")
    return staging
