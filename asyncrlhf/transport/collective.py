"""Transport over a process group of its own, NCCL or gloo: the sender broadcasts bucket after bucket."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.base import LostReceiversError, Ticket, TransferStats
from asyncrlhf.transport.control import Line, LineClosedError, Message, collect, dial, own_host, split_endpoint
from asyncrlhf.transport.group import BroadcastGroup, choose_backend, device_identity
from asyncrlhf.transport.local import staging_for
from asyncrlhf.transport.manifest import FlatBuckets, manifest_digest
from asyncrlhf.transport.snapshot import SnapshotHolder
from asyncrlhf.types import WeightManifest

POLL_SECONDS = 0.002  # how often a receiver looks whether its buckets are complete


class CollectiveSender(SnapshotHolder):
    """Rank 0. A transfer: tell everyone the version, hear that all are ready, broadcast, hear that all are done.

    ``device``: where the learner's parameters live; it decides, with the receivers' devices, between NCCL and gloo.
    """

    def __init__(self, manifest: WeightManifest, *, timeout_seconds: float, device: torch.device | str = "cpu") -> None:
        super().__init__(manifest, device)
        self._timeout_seconds = timeout_seconds
        self._device = torch.device(device)
        self._host = ""
        self._server: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._lines: dict[str, Line] = {}
        self._group: BroadcastGroup | None = None
        self._connected = False

    def listen(self, host: str = "") -> str:
        self._host = host or own_host()
        self._server = socket.create_server((self._host, 0), backlog=256)
        self._store = dist.TCPStore(
            self._host, 0, None, True, timedelta(seconds=self._timeout_seconds), wait_for_workers=False
        )
        return f"{self._host}:{self._server.getsockname()[1]}"

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        with self.lock:
            self._drop_group()
            self.epoch = epoch
            if receivers:
                self._form(list(receivers), epoch)
            self._connected = True

    def transfer(self, ticket: Ticket) -> TransferStats:
        with self.lock:
            self.check_current(ticket)
            if not self._connected:
                raise WeightSyncError(f"No group to send version {ticket.version} to: connect a new epoch first.")
            started = time.perf_counter()
            if self._group is not None:
                self._send(ticket, self._group)
            return TransferStats(time.perf_counter() - started, self.manifest.total_bytes, self.stall_seconds)

    def close(self) -> None:
        """Also ends a transfer that is under way in another thread: its control lines break."""
        for line in list(self._lines.values()):
            line.close()
        with self.lock:
            self._drop_group()
            if self._server is not None:
                self._server.close()
            self._server = self._store = None

    def _send(self, ticket: Ticket, group: BroadcastGroup) -> None:
        what = f"Version {ticket.version} did not reach every receiver"
        self._tell({"version": ticket.version, "epoch": ticket.epoch}, what)
        self._hear("ready", what)
        group.broadcast(self.buckets.tensors)
        self._hear("done", what)
        group.wait()

    def _tell(self, message: Message, what: str) -> None:
        lost = {}
        for name, line in self._lines.items():
            try:
                line.send(message)
            except LineClosedError:
                lost[name] = "died or dropped the connection"
        self._give_up_if(lost, what)

    def _hear(self, kind: str, what: str) -> None:
        self._give_up_if(collect(self._lines, kind, self._timeout_seconds), what)

    def _give_up_if(self, lost: Mapping[str, str], what: str) -> None:
        if lost:
            self._drop_group()
            raise LostReceiversError(what, lost)

    def _drop_group(self) -> None:
        """The closed lines tell the receivers; a broadcast that hangs in the old group is left to its time-out."""
        self._connected = False
        for line in self._lines.values():
            line.close()
        self._lines = {}
        if self._group is not None:
            self._group.dispose()
        self._group = None

    def _form(self, receivers: list[str], epoch: int) -> None:
        if self._store is None:
            raise WeightSyncError("The weight sender does not listen: call listen before connect.")
        what = f"The weight group of epoch {epoch} could not form"
        identities = self._accept(receivers, epoch, what)
        backend = choose_backend([device_identity(self._device), *identities])
        welcome = {"port": self._store.port, "backend": backend, "digest": manifest_digest(self.manifest)}
        self._tell(welcome, what)
        try:
            self._group = BroadcastGroup(
                dist.PrefixStore(f"epoch{epoch}", self._store),
                backend, 0, len(receivers) + 1, self._host, self._device, self._timeout_seconds,
            )  # fmt: skip
        except RuntimeError as error:
            lost = collect(self._lines, "joined", 0.1)
            self._give_up_if(lost or {"group": str(error).splitlines()[0]}, what)
        self._hear("joined", what)
        self._move_buckets(self._group)

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

    def _move_buckets(self, group: BroadcastGroup | None) -> None:
        """Hold the snapshot where the group reads it: on the GPU for NCCL, on the host for gloo."""
        if group is None or group.device.type == self.buckets.device.type:
            return
        old = self.buckets
        self.buckets = FlatBuckets(self.manifest, group.device, pin_memory=group.device.type == "cpu")
        self.buckets.copy_buckets(old.tensors)


class CollectiveReceiver:
    """A rank from 1 on. ``device``: where the engine's parameters live."""

    def __init__(self, *, timeout_seconds: float, device: torch.device | str = "cpu") -> None:
        self._timeout_seconds = timeout_seconds
        self._device = torch.device(device)
        self._epoch = -1
        self._digest = ""
        self._line: Line | None = None
        self._group: BroadcastGroup | None = None
        self._staging: FlatBuckets | None = None

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self._drop_group()
        self._epoch = epoch
        what = f"Receiver {name} could not join the weight group of epoch {epoch}"
        try:
            self._line = dial(endpoint, self._timeout_seconds)
            self._line.send({"name": name, "rank": rank, "epoch": epoch, "device": device_identity(self._device)})
            welcome = self._line.poll(self._timeout_seconds)
            if welcome is None:
                raise TimeoutError(f"the sender gave no answer within {self._timeout_seconds:g} s")
            self._digest = welcome["digest"]
            store = dist.TCPStore(
                split_endpoint(endpoint)[0], welcome["port"], None, False, timedelta(seconds=self._timeout_seconds)
            )
            self._group = BroadcastGroup(
                dist.PrefixStore(f"epoch{epoch}", store),
                welcome["backend"], rank, world_size, self._line.local_host, self._device, self._timeout_seconds,
            )  # fmt: skip
            self._line.send({"joined": epoch})
        except (OSError, RuntimeError, LineClosedError) as error:
            self._drop_group()
            reason = str(error).splitlines()[0] if str(error) else "the sender turned it away or died"
            raise WeightSyncError(f"{what}: {reason}.") from error

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        line, group = self._line, self._group
        if line is None or group is None:
            raise WeightSyncError(f"No group to receive version {ticket.version} from: connect first.")
        try:
            self._agree(ticket, line)
            self._staging = staging_for(ticket.manifest, self._staging, group.device)
            line.send({"ready": ticket.version})
            group.broadcast(self._staging.tensors)
            while not group.finished():
                if line.poll(POLL_SECONDS) is not None:
                    raise WeightSyncError(f"The sender broke off version {ticket.version}.")
            group.wait()
            line.send({"done": ticket.version})
        except (RuntimeError, LineClosedError, WeightSyncError) as error:
            self._report(line, error)
            self._drop_group()
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"Version {ticket.version} was lost on its way: the sender's group ended.") from error
        return self._staging.views()

    def close(self) -> None:
        self._drop_group()

    def _agree(self, ticket: Ticket, line: Line) -> None:
        """Check, before any byte moves, that the sender is about to send just what the ticket says."""
        begin = line.poll(self._timeout_seconds)
        if begin is None:
            raise WeightSyncError(
                f"The sender did not begin version {ticket.version} within {self._timeout_seconds:g} s."
            )
        if (begin.get("version"), begin.get("epoch")) != (ticket.version, self._epoch) or ticket.epoch != self._epoch:
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender sends version "
                f"{begin.get('version')} of epoch {begin.get('epoch')} to a receiver of epoch {self._epoch}."
            )
        if manifest_digest(ticket.manifest) != self._digest:
            raise WeightSyncError(f"The manifest of the ticket for version {ticket.version} is not the sender's.")

    def _report(self, line: Line, error: Exception) -> None:
        """Tell the sender that this process is alive and why it stopped, if the sender still listens."""
        try:
            line.send({"error": str(error).splitlines()[0] if str(error) else type(error).__name__})
        except LineClosedError:
            return

    def _drop_group(self) -> None:
        """Staging memory goes too: a broadcast that hangs in the old group may still write into it."""
        if self._line is not None:
            self._line.close()
        if self._group is not None:
            self._group.dispose()
        self._line = self._group = self._staging = None
