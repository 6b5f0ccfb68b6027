"""Transport over a process group of its own, NCCL or gloo: the sender broadcasts bucket after bucket.

Receivers take a whole version into staging memory. Beside the group the sender has a control line to each of them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.group import (
    BroadcastGroup,
    Line,
    LineClosedError,
    Message,
    admit,
    choose_backend,
    collect,
    device_identity,
    dial,
    join_endpoint,
    new_token,
    own_host,
    split_endpoint,
)
from asyncrlhf.transport.manifest import FlatBuckets, manifest_digest
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.transport.receiver import WeightReceiver
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
        self._token = new_token()
        self._server: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._lines: dict[str, Line] = {}

    def listen(self, host: str = "") -> str:
        self._host = host or own_host()
        self._server = socket.create_server((self._host, 0), backlog=256)
        self._store = dist.TCPStore(
            self._host, 0, None, True, timedelta(seconds=self._timeout_seconds), wait_for_workers=False
        )
        return join_endpoint(self._token, self._host, self._server.getsockname()[1])

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
                dist.PrefixStore(_keys(self._token, epoch), self._store),
                backend, 0, len(receivers) + 1, self._host, self._device, self._timeout_seconds,
            )  # fmt: skip
        except RuntimeError as error:
            lost = collect(self._lines, "joined", 0.1)
            self._give_up_if(lost or {"group": str(error).splitlines()[0]}, what)
        self._hear("joined", what)

    def _accept(self, receivers: list[str], epoch: int, what: str) -> list[str]:
        """Take the receivers' calls until all are there; returns their devices. An old epoch's are sent away, as are
        strangers."""
        assert self._server is not None
        identities: dict[str, str] = {}

        def expected(hello: Message) -> bool:
            name, rank = hello.get("name"), hello.get("rank")
            return hello.get("epoch") == epoch and name in receivers and receivers.index(name) + 1 == rank

        for line, hello in admit(self._server, self._token, expected, self._timeout_seconds):
            name = hello["name"]
            if name in self._lines:
                self._lines[name].close()
            self._lines[name] = line
            identities[name] = str(hello.get("device"))
            if len(identities) == len(receivers):
                break
        missing = {
            name: f"did not join within {self._timeout_seconds:g} s" for name in receivers if name not in identities
        }
        self._give_up_if(missing, what)
        return [identities[name] for name in receivers]


def _keys(token: str, epoch: int) -> str:
    """What the keys of a group's store begin with: a stranger can call torch's store, but not guess them."""
    return f"{token}/epoch{epoch}"


POLL_SECONDS = 0.002  # how often a receiver looks whether a bucket is complete


class CollectiveReceiver(WeightReceiver):
    """A rank from 1 on."""

    _line: Line | None = None
    _group: BroadcastGroup | None = None
    _digest = ""

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self._drop_group()
        super().connect(endpoint, rank, world_size, epoch, name)
        what = f"Receiver {name} could not join the weight group of epoch {epoch}"
        try:
            token, host, _ = split_endpoint(endpoint)
            self._line = dial(endpoint, self._timeout_seconds)
            hello = {"name": name, "rank": rank, "epoch": epoch, "device": device_identity(self._device)}
            self._line.send({"token": token, **hello})
            welcome = self._line.poll(self._timeout_seconds)
            if welcome is None:
                raise TimeoutError(f"the sender gave no answer within {self._timeout_seconds:g} s")
            self._digest = welcome["digest"]
            store = dist.TCPStore(host, welcome["port"], None, False, timedelta(seconds=self._timeout_seconds))
            self._group = BroadcastGroup(
                dist.PrefixStore(_keys(token, epoch), store),
                welcome["backend"], rank, world_size, self._line.local_host, self._device, self._timeout_seconds,
            )  # fmt: skip
            self._line.send({"joined": epoch})
        except (OSError, RuntimeError, LineClosedError) as error:
            self._drop_group()
            reason = str(error).splitlines()[0] if str(error) else "the sender turned it away or died"
            raise WeightSyncError(f"{what}: {reason}.") from error

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        with self._taking_part(ticket) as (line, group):
            begin = self._agree(ticket, line)
            staging, _ = self._staged.begin(ticket, group.device)
            coming = list(begin["buckets"])
            line.send({"ready": ticket.version})
            group.broadcast([staging.tensors[bucket] for bucket in coming])
            for place, bucket in enumerate(coming):
                while not group.completed(place):
                    if line.poll(POLL_SECONDS) is not None:
                        raise WeightSyncError(f"The sender broke off version {ticket.version}.")
                group.wait_one(place)
                self._staged.verify(ticket, bucket)
            group.wait()
            weights = self._staged.finish(ticket)
            line.send({"done": ticket.version})
            return weights

    def close(self) -> None:
        self._drop_group()

    @contextmanager
    def _taking_part(self, ticket: Ticket) -> Iterator[tuple[Line, BroadcastGroup]]:
        """A transfer that does not end well ends the group, and the sender hears why."""
        line, group = self._line, self._group
        if line is None or group is None:
            raise WeightSyncError(f"No group to receive version {ticket.version} from: connect first.")
        try:
            yield line, group
        except (RuntimeError, LineClosedError, WeightSyncError) as error:
            with suppress(LineClosedError):  # unless the sender gave up first
                line.send({"error": str(error).splitlines()[0] if str(error) else type(error).__name__})
            self._drop_group()
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"Version {ticket.version} was lost on its way: the sender's group ended.") from error

    def _agree(self, ticket: Ticket, line: Line) -> Message:
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
        return begin

    def _drop_group(self) -> None:
        """Staging memory goes too: a broadcast that hangs in the old group may still write into it."""
        if self._line is not None:
            self._line.close()
        if self._group is not None:
            self._group.dispose()
        self._line = self._group = None
        self._staged.drop()
