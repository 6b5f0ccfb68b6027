"""Transport on one machine: the snapshot lies in memory that receivers map and read; no bytes are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, entries_by_bucket, view_of
from asyncrlhf.transport.memory_file import Place, SharedBuckets, open_buckets
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver, check_bucket
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.types import WeightManifest


class MappedSender(WeightSender):
    """The snapshot lies where receivers open it; the first of a ticket's ``refs`` names that memory. There is no group,
    so that an epoch has no meaning."""

    def _check_current(self, ticket: Ticket) -> None:
        if ticket.version != self.version:
            raise WeightSyncError(
                f"The ticket is for version {ticket.version}, but the sender holds version {self.version}."
            )


class MappedReceiver(WeightReceiver):
    """Opens the sender's memory at the first ticket, and keeps it open. The caller must not write into it."""

    _opened: tuple[str, list[torch.Tensor]] | None = None  # the memory's name, and its buckets

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        """As of every receiver, but all buckets stay valid until the sender's next snapshot, not only the last."""
        buckets = self._buckets(ticket)
        for bucket, entries in enumerate(entries_by_bucket(ticket.manifest)):
            views = {entry.name: view_of(entry, buckets[bucket]) for entry in entries}
            check_bucket(ticket, bucket, entries, views, self._staged.name)
            yield views

    def _buckets(self, ticket: Ticket) -> list[torch.Tensor]:
        if self._opened is None or self._opened[0] != ticket.refs[0]:
            self._opened = None  # the memory of a learner that ended is freed before another's is opened
            self._opened = ticket.refs[0], self._open(ticket)
        return self._opened[1]

    def _open(self, ticket: Ticket) -> list[torch.Tensor]:
        """The buckets in the sender's memory, uint8 [bytes] each."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        self._opened = None


class SharedMemorySender(MappedSender):
    """A ticket names the process and its file descriptor of the memory. Every process of the same user on the same
    machine can map it."""

    def __init__(self, manifest: WeightManifest, wire: Wire | None = None) -> None:
        super().__init__(manifest, "meta", wire)
        self.buckets = self._shared = SharedBuckets(manifest)

    def _refs(self, version: int) -> Place:
        return self._shared.place


class SharedMemoryReceiver(MappedReceiver):
    """Maps the memory of a process on the same machine; :meth:`receive` copies it."""

    def _fetch(self, ticket: Ticket, staging: FlatBuckets, wanted: list[int]) -> None:
        buckets = self._buckets(ticket)
        staging.copy_buckets([buckets[i] for i in wanted], wanted)

    def _open(self, ticket: Ticket) -> list[torch.Tensor]:
        try:
            return open_buckets(ticket.refs, ticket.manifest)
        except OSError as error:
            raise WeightSyncError(
                f"{self._staged.name} cannot map the weights in another process ({error}); allowed: "
                "weights.transport=collective, or all generators on the learner's machine, where they may open its "
                "files in /proc."
            ) from error
