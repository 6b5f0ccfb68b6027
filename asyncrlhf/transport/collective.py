"""Transport over a process group of its own, NCCL or gloo: the sender broadcasts bucket after bucket."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.group import BroadcastGroup
from asyncrlhf.transport.manifest import FlatBuckets, manifest_digest
from asyncrlhf.transport.membership import Membership
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.snapshot import SnapshotHolder, Wire
from asyncrlhf.transport.staging import payload_bytes
from asyncrlhf.types import WeightManifest


def _lost(version: int) -> str:
    return f"Version {version} did not reach every receiver"


class CollectiveSender(SnapshotHolder):
    """Rank 0. A transfer: tell everyone the version, hear that all are ready, broadcast, hear that all are done.

    ``device``: where the learner's parameters live.
    """

    def __init__(
        self, manifest: WeightManifest, *, timeout_seconds: float, device: torch.device | str = "cpu",
        wire: Wire | None = None,
    ) -> None:  # fmt: skip
        super().__init__(manifest, device, wire)
        self._members = Membership(timeout_seconds, torch.device(device))

    def listen(self, host: str = "") -> str:
        return self._members.listen(host)

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        with self.lock:
            self.epoch, self.sent = epoch, ()
            self._members.form(list(receivers), epoch, manifest_digest(self.manifest))
            self._move_buckets(self._members.group)

    def transfer(self, ticket: Ticket) -> TransferStats:
        with self.lock:
            self.check_current(ticket)
            self._check_connected(ticket)
            started, outgoing = time.perf_counter(), self.outgoing()
            if self._members.group is not None:
                self._send(ticket, self._members.group, outgoing)
            return TransferStats(
                time.perf_counter() - started, payload_bytes(self.manifest, outgoing), self.stall_seconds
            )

    def close(self) -> None:
        """Also ends a transfer that is under way in another thread."""
        self._members.hang_up()
        with self.lock:
            self._members.close()

    def _check_connected(self, ticket: Ticket) -> None:
        if not self._members.connected:
            raise WeightSyncError(f"No group to send version {ticket.version} to: connect a new epoch first.")

    def _send(self, ticket: Ticket, group: BroadcastGroup, outgoing: list[int]) -> None:
        what = _lost(ticket.version)
        self.sent = ()
        self._members.tell({"version": ticket.version, "epoch": ticket.epoch, "buckets": outgoing}, what)
        self._members.hear("ready", what)
        group.broadcast([self.buckets.tensors[bucket] for bucket in outgoing])
        self._members.hear("done", what)
        group.wait()
        self.sent = ticket.checksums

    def _move_buckets(self, group: BroadcastGroup | None) -> None:
        """Hold the snapshot where the group reads it: on the GPU for NCCL, on the host for gloo."""
        if group is None or group.device.type == self.buckets.device.type:
            return
        old = self.buckets
        self.buckets = FlatBuckets(self.manifest, group.device, pin_memory=group.device.type == "cpu")
        self.buckets.copy_buckets(old.tensors)
