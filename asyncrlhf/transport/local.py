"""Transport inside one process: a ticket carries the snapshot by reference, a receiver copies it."""

from __future__ import annotations

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, manifest_difference
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver
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
    """Copies the snapshot into its own staging memory."""

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
