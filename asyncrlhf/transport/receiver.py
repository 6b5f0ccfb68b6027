"""The common part of all receivers: staging memory for one whole set of weights, and the check of its checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import (
    FlatBuckets,
    bucket_checksum,
    changed_buckets,
    entries_by_bucket,
    manifest_difference,
)
from asyncrlhf.transport.memory_file import Place, SharedBuckets
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.sparse import Chain, Head, Link, apply, needed
from asyncrlhf.types import TensorEntry

NAMES_SHOWN = 10


def check_bucket(
    ticket: Ticket, bucket: int, entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor], receiver: str
) -> None:
    """Raise WeightSyncError, naming the bucket, its tensors and the receiver, if its checksum is not the ticket's. A
    ticket without checksums is not checked."""
    if not ticket.checksums:
        return
    found, expected = bucket_checksum(entries, tensors), ticket.checksums[bucket]
    if found != expected:
        names = ", ".join(entry.name for entry in entries[:NAMES_SHOWN])
        more = f" and {len(entries) - NAMES_SHOWN} more" if len(entries) > NAMES_SHOWN else ""
        raise WeightSyncError(
            f"Bucket {bucket} of version {ticket.version} arrived at {receiver} with the checksum "
            f"{found:016x} instead of {expected:016x}; it holds {names}{more}."
        )


class Staging:
    """Allocated at the first ticket. ``name``: the receiver's, for its errors."""

    def __init__(self, name: str = "a receiver without a name", shared: bool = False) -> None:
        """``shared``: in memory on the host that other processes may map at ``place``."""
        self.name, self._shared = name, shared
        self._buckets: FlatBuckets | None = None
        self._entries: list[list[TensorEntry]] = []
        self._checksums: tuple[int, ...] = ()  # of the buckets' content; empty: unknown
        self._held: tuple[int, ...] = ()  # the same when the present ticket came
        self._pending: set[int] = set()  # buckets of the present ticket that were not verified yet

    def begin(self, ticket: Ticket, device: torch.device | str = "cpu") -> tuple[FlatBuckets, list[int]]:
        """The memory for ``ticket``, and the buckets that it lacks.

        Raises WeightSyncError when the layout has changed: a run publishes one model, so this is a mistake.
        """
        if self._buckets is None:
            room = SharedBuckets(ticket.manifest) if self._shared else FlatBuckets(ticket.manifest, device)
            self._buckets, self._entries = room, entries_by_bucket(ticket.manifest)
        difference = manifest_difference(self._buckets.manifest, ticket.manifest)
        if difference is not None:
            raise WeightSyncError(f"The ticket's manifest is not the one of this run: {difference}.")
        self._held = self._checksums if ticket.sparse else ()
        wanted = changed_buckets(self._held, ticket.checksums)
        # From here on the bytes belong to neither version: an error must not leave their checksums valid.
        self._checksums, self._pending = (), set(range(len(self._entries)))
        return self._buckets, wanted if ticket.sparse else list(range(len(self._entries)))

    @property
    def place(self) -> Place:
        """Where other processes map the buckets; of ``shared`` ones, once a ticket came."""
        assert isinstance(self._buckets, SharedBuckets)
        return self._buckets.place

    def give_up(self) -> SharedBuckets:
        """Hand over the memory of a complete version. The next one comes to that of :meth:`go_on_in`."""
        buckets, self._buckets = self._buckets, None
        assert isinstance(buckets, SharedBuckets)
        return buckets

    def go_on_in(self, buckets: SharedBuckets, before: SharedBuckets | None) -> None:
        """Use other memory, with the content of the memory ``before`` where that is known."""
        self._buckets, self._entries = buckets, entries_by_bucket(buckets.manifest)
        if before is not None and self._checksums:
            buckets.copy_buckets(before.tensors)

    def content(self, bucket: int) -> int | None:
        """The checksum of what a bucket held when the present ticket came; None: unknown."""
        return self._held[bucket] if self._held else None

    def patch(self, ticket: Ticket, bucket: int, head: Head, payload: torch.Tensor, held: int | None) -> None:
        """Apply a patch to a bucket whose content has the checksum ``held``. Raises WeightSyncError, naming the bucket
        and the receiver, if the patch belongs to another one, or is damaged so that it fits no bucket."""
        assert self._buckets is not None, "begin comes first"
        try:
            if held != head.base:
                raise WeightSyncError("A patch belongs to another content than that of its bucket.")
            apply(head, payload.to(self._buckets.device), self._buckets.tensors[bucket])
        except WeightSyncError as error:
            raise WeightSyncError(
                f"Bucket {bucket} of version {ticket.version} did not arrive at {self.name}: {error}"
            ) from error

    def follow(
        self, ticket: Ticket, bucket: int, chain: Chain, whole: Callable[[Link], object],
        payload: Callable[[Link, Head], torch.Tensor],
    ) -> None:  # fmt: skip
        """Bring a bucket to the end of ``chain`` by the parts that it lacks: ``whole`` writes a whole bucket, and
        ``payload`` gives a patch's."""
        held = self.content(bucket)
        for link in needed(chain, held):
            if link.patch is None:
                whole(link)
            else:
                self.patch(ticket, bucket, link.patch, payload(link, link.patch), held)
            held = link.end

    def verify(self, ticket: Ticket, bucket: int) -> None:
        """Check one complete bucket; raises as :func:`check_bucket`."""
        if self._buckets is not None and bucket in self._pending:
            check_bucket(ticket, bucket, self._entries[bucket], self._buckets.views(), self.name)
        self._pending.discard(bucket)

    def finish(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        """Verify all unverified buckets, also kept ones, into which the engine may have written. Returns the
        tensors."""
        assert self._buckets is not None, "begin comes first"
        for bucket in sorted(self._pending):
            self.verify(ticket, bucket)
        self._checksums = ticket.checksums
        return self._buckets.views()

    def drop(self) -> None:
        """Release the memory: a broadcast may still write into it."""
        if isinstance(self._buckets, SharedBuckets):
            self._buckets.close()
        self._buckets = None
        self._checksums = ()


class WeightReceiver:
    """The receiver of an engine; its calls run in one thread while the engine continues sampling."""

    def __init__(self, *, timeout_seconds: float = 120.0, device: torch.device | str = "cpu") -> None:
        """``device``: that of the engine's parameters."""
        self._timeout_seconds = timeout_seconds
        self._device = torch.device(device)
        self._epoch = -1
        self._staged = Staging()
        self._turn = threading.Lock()  # a call that outlived its learner may still write into the staging memory

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """Join the group of ``epoch`` as ``rank`` (1 <= rank < ``world_size``; the sender is 0)."""
        self._epoch, self._staged.name = epoch, name

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        """Take part in the transfer of ``ticket``. Returns views on staging memory, valid until the next call.

        Raises WeightSyncError when the sender sends another version than the ticket's, the sender is lost, or a
        bucket's checksum differs.
        """
        with self._turn:
            staging, wanted = self._staged.begin(ticket)
            self._fetch(ticket, staging, wanted)
            return self._staged.finish(ticket)

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        """Take part in the transfer of ``ticket`` without memory for the whole version: yields the tensors of one
        bucket after the other, valid until the next. Raises as :meth:`receive`; a caller that stops early ends the
        receiver's membership."""
        raise NotImplementedError

    def loaded(self) -> None:
        """The engine has been given a version to load; returns when it no longer reads what this receiver yielded."""

    def _fetch(self, ticket: Ticket, staging: FlatBuckets, wanted: list[int]) -> None:
        """Fill the buckets ``wanted``."""
        raise NotImplementedError

    def close(self) -> None:
        self._staged.drop()
