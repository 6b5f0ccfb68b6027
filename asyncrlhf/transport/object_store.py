"""Transport through Ray's object store: a ticket carries references to the buckets, receivers fetch them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import FlatBuckets, ShardedParams
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.types import WeightManifest


class ObjectStoreSender(WeightSender):
    """Needs Ray. ``ticket`` copies the snapshot into the store once, and uses references to unchanged buckets again."""

    def __init__(
        self, manifest: WeightManifest, wire: Wire | None = None, sharded: ShardedParams | None = None
    ) -> None:
        super().__init__(manifest, wire=wire, sharded=sharded)
        self._references: dict[int, Any] = {}  # by bucket
        self._stored: TransferStats | None = None  # of the newest snapshot

    def _prepare(self) -> None:
        self._stored = None

    def _refs(self, version: int) -> tuple[Any, ...]:
        import ray

        if self._stored is None:
            started, outgoing = time.perf_counter(), self.outgoing()
            for bucket in outgoing:
                self._references[bucket] = ray.put(self.buckets.tensors[bucket].cpu().numpy())
            self.sent = self.checksums
            sent_bytes = sum(self.manifest.bucket_bytes[bucket] for bucket in outgoing)
            self._stored = TransferStats(time.perf_counter() - started, sent_bytes, 0.0)
        return tuple(self._references[bucket] for bucket in sorted(self._references))

    def transfer(self, ticket: Ticket) -> TransferStats:
        """Returns at once, because ``ticket`` has filled the store; ``seconds`` is that time. A receiver has the
        weights when its ``receive`` returns, and Ray itself reports one that died."""
        with self.lock:
            self._check_current(ticket)
            assert self._stored is not None, "a ticket fills the store"
            return replace(self._stored, stall_seconds=self.stall_seconds)

    def close(self) -> None:
        self._references, self._stored = {}, None


class ObjectStoreReceiver(WeightReceiver):
    """Maps the store's memory and copies it into its own staging memory.

    The copy frees the store early, and an engine that loads in place cannot write into shared memory.
    """

    def _fetch(self, ticket: Ticket, staging: FlatBuckets, wanted: list[int]) -> None:
        import ray

        try:
            arrays = ray.get([ticket.refs[bucket] for bucket in wanted], timeout=self._timeout_seconds)
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"Weights of version {ticket.version} could not be fetched from the object store within "
                f"{self._timeout_seconds:g} s: {type(error).__name__}."
            ) from error
        staging.copy_buckets(arrays, wanted)
