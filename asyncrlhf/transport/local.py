"""Transport inside one process: a ticket carries the snapshot by reference, a receiver copies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, manifest_difference
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.snapshot import SnapshotHolder
from asyncrlhf.transport.staging import Staging, payload_bytes


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
            return self.new_ticket((self.buckets,))

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Nothing travels before a receiver copies; the receivers may live in the calling thread."""
        payload = payload_bytes(self.manifest, self.outgoing())
        self.sent = ticket.checksums
        return TransferStats(0.0, payload, self.stall_seconds)

    def close(self) -> None:
        """Nothing is held open."""


class LocalReceiver:
    """Copies the snapshot into staging memory of its own."""

    def __init__(self) -> None:
        self._staged = Staging()

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """A local receiver needs no group."""
        self._staged.name = name

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        staging, wanted = self._staged.begin(ticket)
        (source,) = ticket.refs
        difference = manifest_difference(ticket.manifest, source.manifest)
        if difference is not None:
            raise WeightSyncError(f"Version {ticket.version} does not fit its ticket's manifest: {difference}.")
        staging.copy_buckets([source.tensors[i] for i in wanted], wanted)
        return self._staged.finish(ticket)

    def close(self) -> None:
        self._staged.drop()
