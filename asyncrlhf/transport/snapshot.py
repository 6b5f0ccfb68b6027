"""What senders of a snapshot share: the learner's weights in flat buckets, their checksums, their ticket."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.checksum import changed_buckets, manifest_checksums
from asyncrlhf.transport.gather import held
from asyncrlhf.transport.manifest import FlatBuckets
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import WeightManifest


@dataclass(frozen=True)
class Wire:
    """How weights travel. ``cast``: the dtype of floating tensors on the way (None: as they are), which is what the
    manifest was built with. ``delta`` needs ``checksum``.
    """

    cast: torch.dtype | None = None
    checksum: bool = True
    delta: bool = False


class SnapshotHolder:
    """One version at a time, copied into flat buckets in a thread of its own; ``lock`` guards the copy.

    ``begin_snapshot`` and ``fence`` belong to the training thread. Between them it may read the parameters, as a
    forward and backward pass does, but not change them: so the copy costs the learner next to nothing. The checksums
    are taken after the fence.
    """

    def __init__(self, manifest: WeightManifest, device: torch.device | str = "cpu", wire: Wire | None = None) -> None:
        """``device``: where the copy lies."""
        self.manifest = manifest
        self.wire = wire or Wire()
        self.epoch = 0
        self.lock = threading.Lock()
        self.stall_seconds = 0.0
        self.version: int | None = None
        self.checksums: tuple[int, ...] = ()
        self.sent: tuple[int, ...] = ()  # the checksums of what went out last; empty: nothing that receivers still hold
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="weight-snapshot")
        self._copy: Future[None] | None = None
        self._begun: list[Future[None]] = []
        self.buckets = FlatBuckets(manifest, device)

    def begin_snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        self.fence()
        self.stall_seconds = 0.0
        self._copy = self._copier.submit(self._take, version, held(params))
        self._begun = [self._copy, self._copier.submit(self._complete)]

    def fence(self) -> float:
        copy, self._copy = self._copy, None
        if copy is None:
            return 0.0
        started = time.perf_counter()
        try:
            copy.result()
        finally:
            self.stall_seconds = time.perf_counter() - started
        return self.stall_seconds

    def settle(self) -> None:
        """Wait for a copy that has begun; its error, if any, is the training thread's to raise."""
        wait(self._begun)

    def new_ticket(self, refs: tuple[Any, ...] = ()) -> Ticket:
        """Call with ``lock`` held, after ``settle``."""
        return Ticket(self.newest(), self.epoch, self.manifest, refs, self.checksums, self.wire.delta)

    def outgoing(self) -> list[int]:
        """The buckets that have to be sent: without ``weights.delta`` all of them."""
        everything = list(range(len(self.manifest.bucket_bytes)))
        return changed_buckets(self.sent, self.checksums) if self.wire.delta else everything

    def check_current(self, ticket: Ticket) -> None:
        """Raise unless ``ticket`` is that of the present snapshot and group; call with ``lock`` held."""
        if (ticket.version, ticket.epoch) != (self.version, self.epoch):
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender holds "
                f"version {self.version} of epoch {self.epoch}."
            )

    def newest(self) -> int:
        if self.version is None:
            raise WeightSyncError("There is no snapshot to publish: call begin_snapshot first.")
        return self.version

    def _take(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        with self.lock:
            # Not the old version with half of the new weights, should a tensor be refused.
            self.version, self.checksums = None, ()
            self.copy_params(params)
            self.version = version

    def _complete(self) -> None:
        with self.lock:
            if self.version is not None and self.wire.checksum:
                self.checksums = manifest_checksums(self.manifest, self.buckets.views())

    def snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> float:
        """``begin_snapshot`` and ``fence``: seconds that the caller stood still."""
        self.begin_snapshot(version, params)
        return self.fence()

    def ticket(self) -> Ticket:
        self.settle()
        with self.lock:
            return self.new_ticket()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        self.settle()
        with self.lock:
            self.newest()
            return self.buckets.views()

    def prepare(self) -> None:
        """What a transport does, with ``lock`` held, before the buckets are overwritten."""

    def copy_params(self, params: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters; runs with ``lock`` held, and the training thread's fence waits for it."""
        self.prepare()
        self.buckets.copy_from(params, self.wire.cast)
