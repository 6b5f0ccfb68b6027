"""What all senders share: the learner's snapshot in flat buckets, its ticket and its export."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.base import Ticket
from asyncrlhf.transport.manifest import FlatBuckets
from asyncrlhf.types import WeightManifest


class SnapshotHolder:
    """One snapshot at a time. ``lock`` is held by whoever reads or writes the buckets.

    ``begin_snapshot`` and ``fence`` belong to the training thread. Between them it may read the parameters, as a
    forward and backward pass does, but not change them: so the copy costs the learner next to nothing.
    """

    def __init__(self, manifest: WeightManifest, device: torch.device | str = "cpu") -> None:
        self.manifest = manifest
        self.epoch = 0
        self.lock = threading.Lock()
        self.stall_seconds = 0.0
        self.version: int | None = None
        self.buckets = FlatBuckets(manifest, device)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="weight-snapshot")
        self._copy: Future[None] | None = None

    def begin_snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        self.fence()
        self.stall_seconds = 0.0
        self._copy = self._copier.submit(self._copy_params, version, dict(params))

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

    def snapshot(self, version: int, params: Mapping[str, torch.Tensor]) -> float:
        self.begin_snapshot(version, params)
        return self.fence()

    def ticket(self) -> Ticket:
        self.settle()
        with self.lock:
            return Ticket(self._newest(), self.epoch, self.manifest)

    def export(self) -> tuple[Ticket, list[NDArray[np.uint8]]]:
        self.settle()
        with self.lock:
            ticket = Ticket(self._newest(), self.epoch, self.manifest)
            return ticket, [bucket.to("cpu", copy=True).numpy() for bucket in self.buckets.tensors]

    def settle(self) -> None:
        """Wait for a copy that has begun; its error, if any, is the training thread's to raise."""
        copy = self._copy
        if copy is not None:
            wait([copy])

    def prepare(self) -> None:
        """What a transport does, with ``lock`` held, before the buckets are overwritten."""

    def check_current(self, ticket: Ticket) -> None:
        """Raise unless ``ticket`` is that of the present snapshot and group; call with ``lock`` held."""
        if (ticket.version, ticket.epoch) != (self.version, self.epoch):
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender holds "
                f"version {self.version} of epoch {self.epoch}."
            )

    def _copy_params(self, version: int, params: Mapping[str, torch.Tensor]) -> None:
        with self.lock:
            # Not the old version with half of the new weights, should a tensor be refused.
            self.version = None
            self.prepare()
            self.buckets.copy_from(params)
            self.version = version

    def _newest(self) -> int:
        if self.version is None:
            raise WeightSyncError("There is no snapshot to publish: call snapshot first.")
        return self.version
