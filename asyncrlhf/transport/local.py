"""Transport inside one process: a ticket carries the snapshot by reference, a receiver copies it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, entries_by_bucket, manifest_difference
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver, check_bucket
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.transport.sparse import Patch


class LocalSender(WeightSender):
    """Each snapshot has its own memory, so that a ticket stays valid indefinitely. No bytes move before a
    receiver copies; the receivers may run in the calling thread."""

    _sent: tuple[int, ...] = ()  # checksums of the version sent last

    def _prepare(self) -> None:
        self.buckets = FlatBuckets(self.manifest)

    def _past(self) -> FlatBuckets:
        return self.buckets

    def _refs(self, version: int) -> tuple[FlatBuckets, dict[int, Patch]]:
        return self.buckets, self.patches

    def _send(self, ticket: Ticket) -> int:
        outgoing, self._sent = self.outgoing(self._sent), ticket.checksums
        return self.payload(outgoing)

    def _check_current(self, ticket: Ticket) -> None:
        """Does nothing: every ticket is valid."""


class LocalReceiver(WeightReceiver):
    """Copies the snapshot into its own staging memory. With ``weights.transport=relay`` others load what it received
    last, of which the snapshot is a copy that stays."""

    _received: Ticket | None = None

    def receive(self, ticket: Ticket, read: Sequence[Any] | None = None) -> Mapping[str, torch.Tensor]:
        self._received = None
        weights = super().receive(ticket)
        self._received = ticket
        return weights

    def offer(self) -> Ticket:
        if self._received is None:
            raise WeightSyncError("There is no version to hand on: it was not received whole.")
        return self._received

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        views = ticket.refs[0].views()
        for bucket, entries in enumerate(entries_by_bucket(ticket.manifest)):
            check_bucket(ticket, bucket, entries, views, self._staged.name)
            yield {entry.name: views[entry.name] for entry in entries}

    def _fetch(self, ticket: Ticket, staging: FlatBuckets, wanted: list[int]) -> None:
        source, patches = ticket.refs
        difference = manifest_difference(ticket.manifest, source.manifest)
        if difference is not None:
            raise WeightSyncError(f"Version {ticket.version} does not fit its ticket's manifest: {difference}.")
        for bucket in wanted:
            patch, held = patches.get(bucket), self._staged.content(bucket)
            if patch is not None and patch.head.base == held:
                self._staged.patch(ticket, bucket, patch.head, patch.payload, held)
            else:
                staging.copy_buckets([source.tensors[bucket]], [bucket])
