"""Transport through Ray's object store: a ticket carries references to the buckets, receivers fetch them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.snapshot import SnapshotHolder, Wire
from asyncrlhf.transport.staging import Staging, payload_bytes
from asyncrlhf.types import WeightManifest


class ObjectStoreSender(SnapshotHolder):
    """Needs a running Ray. ``ticket`` copies the snapshot into the store; Ray keeps it as long as the ticket lives."""

    def __init__(self, manifest: WeightManifest, device: torch.device | str = "cpu", wire: Wire | None = None) -> None:
        super().__init__(manifest, device, wire)
        self._newest_ticket: Ticket | None = None
        self._put_seconds = 0.0
        self._put_bytes = 0
        self._references: list[Any] = [None] * len(manifest.bucket_bytes)

    def listen(self, host: str = "") -> str:
        return ""

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        with self.lock:
            self.epoch = epoch

    def prepare(self) -> None:
        self._newest_ticket = None

    def ticket(self) -> Ticket:
        self.settle()
        with self.lock:
            version, known = self.newest(), self._newest_ticket
            if known is not None and known.version == version:
                if known.epoch != self.epoch:  # what lies in the store serves every epoch
                    known = self._newest_ticket = self.new_ticket(known.refs)
                return known
            self._put()
            self._newest_ticket = self.new_ticket(tuple(self._references))
            return self._newest_ticket

    def _put(self) -> None:
        """References to unchanged buckets are handed out again."""
        import ray

        started, outgoing = time.perf_counter(), self.outgoing()
        for bucket in outgoing:
            self._references[bucket] = ray.put(self.buckets.tensors[bucket].cpu().numpy())
        self.sent = self.checksums
        self._put_seconds = time.perf_counter() - started
        self._put_bytes = payload_bytes(self.manifest, outgoing)

    def transfer(self, ticket: Ticket) -> TransferStats:
        """The store is filled by ``ticket``; ``seconds`` is what that took. A receiver has the weights when its
        ``receive`` returns, and Ray itself reports one that died.
        """
        with self.lock:
            self.check_current(ticket)
            return TransferStats(self._put_seconds, self._put_bytes, self.stall_seconds)

    def close(self) -> None:
        self._newest_ticket = None
        self._references = []


class ObjectStoreReceiver:
    """Reads the store's memory without a copy on the way and copies it into staging memory of its own.

    The copy frees the store early, and an engine that loads in place cannot write into shared memory.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._staged = Staging()

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        """The object store needs no group."""
        self._staged.name = name

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        import ray

        staging, wanted = self._staged.begin(ticket)
        try:
            arrays = ray.get([ticket.refs[bucket] for bucket in wanted], timeout=self._timeout_seconds)
        except ray.exceptions.RayError as error:
            raise WeightSyncError(
                f"Weights of version {ticket.version} could not be fetched from the object store within "
                f"{self._timeout_seconds:g} s: {type(error).__name__}."
            ) from error
        staging.copy_buckets(arrays, wanted)
        return self._staged.finish(ticket)

    def close(self) -> None:
        self._staged.drop()
