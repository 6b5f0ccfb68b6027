"""Transport over a process group of its own, NCCL or gloo: the sender broadcasts bucket after bucket.

Beside the group the sender has a control line to each receiver.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.control import Line, LineClosedError, Message, collect, own_host
from asyncrlhf.transport.group import BroadcastGroup, choose_backend, device_identity
from asyncrlhf.transport.manifest import FlatBuckets, manifest_digest
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.types import WeightManifest


class CollectiveSender(WeightSender):
    """Rank 0. A transfer: tell everyone the version, hear that all are ready, broadcast, hear that all are done. The
    loss of a receiver ends the group.

    ``device``: where the learner's parameters live; it decides, with the receivers' devices, between NCCL and gloo.
    """

    def __init__(
        self, manifest: WeightManifest, *, timeout_seconds: float, device: torch.device | str = "cpu",
        wire: Wire | None = None,
    ) -> None:  # fmt: skip
        super().__init__(manifest, device, wire)
        self._device = torch.device(device)
        self._timeout_seconds = timeout_seconds
        self._connected = False
        self._group: BroadcastGroup | None = None  # None without receivers
        self._host = ""
        self._server: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._lines: dict[str, Line] = {}

    def listen(self, host: str = "") -> str:
        self._host = host or own_host()
        self._server = socket.create_server((self._host, 0), backlog=256)
        self._store = dist.TCPStore(
            self._host, 0, None, True, timedelta(seconds=self._timeout_seconds), wait_for_workers=False
        )
        return f"{self._host}:{self._server.getsockname()[1]}"

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        with self.lock:
            self.epoch, self.sent = epoch, ()
            self._drop()
            if receivers:
                self._form(list(receivers), epoch)
            self._connected = True
            self._move_buckets()

    def close(self) -> None:
        # Who waits on a broken line finds its end; that thread, or the lines below, give them back.
        for line in list(self._lines.values()):
            line.hang_up()
        with self.lock:
            self._drop()
            if self._server is not None:
                self._server.close()
            self._server = self._store = None

    def _send(self, ticket: Ticket, outgoing: list[int]) -> None:
        if not self._connected:
            raise WeightSyncError(f"No group to send version {ticket.version} to: connect a new epoch first.")
        if self._group is None:
            return
        what = f"Version {ticket.version} did not reach every receiver"
        self.sent = ()
        self._tell({"version": ticket.version, "epoch": ticket.epoch, "buckets": outgoing}, what)
        self._hear("ready", what)
        self._group.broadcast([self.buckets.tensors[bucket] for bucket in outgoing])
        self._hear("done", what)
        self._group.wait()

    def _move_buckets(self) -> None:
        """Hold the snapshot where the group reads it: on the GPU for NCCL, on the host for gloo."""
        group = self._group
        if group is None or group.device.type == self.buckets.device.type:
            return
        old = self.buckets
        self.buckets = FlatBuckets(self.manifest, group.device, pin_memory=group.device.type == "cpu")
        self.buckets.copy_buckets(old.tensors)

    def _tell(self, message: Message, what: str) -> None:
        """Send to all; ``what`` begins the sentence about receivers that are lost."""
        lost = {}
        for name, line in self._lines.items():
            try:
                line.send(message)
            except LineClosedError:
                lost[name] = "died or dropped the connection"
        self._give_up_if(lost, what)

    def _hear(self, kind: str, what: str) -> None:
        """Wait until all have sent a message with the key ``kind``."""
        self._give_up_if(collect(self._lines, kind, self._timeout_seconds), what)

    def _drop(self) -> None:
        """The closed lines tell the receivers; a broadcast that hangs in the old group is left to its time-out."""
        self._connected = False
        for line in self._lines.values():
            line.close()
        self._lines = {}
        if self._group is not None:
            self._group.dispose()
        self._group = None

    def _give_up_if(self, lost: Mapping[str, str], what: str) -> None:
        if lost:
            self._drop()
            raise LostReceiversError(what, lost)

    def _form(self, receivers: list[str], epoch: int) -> None:
        if self._store is None:
            raise WeightSyncError("The weight sender does not listen: call listen before connect.")
        what = f"The weight group of epoch {epoch} could not form"
        identities = self._accept(receivers, epoch, what)
        backend = choose_backend([device_identity(self._device), *identities])
        self._tell({"port": self._store.port, "backend": backend, "digest": manifest_digest(self.manifest)}, what)
        try:
            self._group = BroadcastGroup(
                dist.PrefixStore(f"epoch{epoch}", self._store),
                backend, 0, len(receivers) + 1, self._host, self._device, self._timeout_seconds,
            )  # fmt: skip
        except RuntimeError as error:
            lost = collect(self._lines, "joined", 0.1)
            self._give_up_if(lost or {"group": str(error).splitlines()[0]}, what)
        self._hear("joined", what)

    def _accept(self, receivers: list[str], epoch: int, what: str) -> list[str]:
        """Take the receivers' calls until all are there; returns their devices. An old epoch's are sent away."""
        assert self._server is not None
        identities: dict[str, str] = {}
        deadline = time.monotonic() + self._timeout_seconds
        while len(identities) < len(receivers) and (remaining := deadline - time.monotonic()) > 0:
            self._server.settimeout(remaining)
            try:
                line = Line(self._server.accept()[0])
                hello = line.poll(min(1.0, remaining)) or {}
            except (TimeoutError, LineClosedError):
                continue
            name = hello.get("name")
            if hello.get("epoch") != epoch or name not in receivers or receivers.index(name) + 1 != hello.get("rank"):
                line.close()
                continue
            if name in self._lines:
                self._lines[name].close()
            self._lines[name] = line
            identities[name] = hello["device"]
        missing = {
            name: f"did not join within {self._timeout_seconds:g} s" for name in receivers if name not in identities
        }
        self._give_up_if(missing, what)
        return [identities[name] for name in receivers]
