"""The sender of the transport over process groups of its own, NCCL or gloo: it broadcasts bucket after bucket.

Beside a group it has a control line to each receiver; :mod:`~asyncrlhf.transport.collective.receiver` is the other end.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from asyncrlhf.errors import LearnerLostError, WeightSyncError
from asyncrlhf.transport.collective.control_line import (
    GRACE_SECONDS,
    Line,
    LineClosedError,
    Message,
    admit,
    collect,
    join_endpoint,
    new_token,
    own_host,
)
from asyncrlhf.transport.collective.group import BroadcastGroup, choose_backend, device_identity, formed, group_keys
from asyncrlhf.transport.manifest import GatheredBuckets, ShardedParams, manifest_digest
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.transport.sparse import Patch
from asyncrlhf.types import WeightManifest


class Members:
    """The receivers of one epoch: a control line to each, and the process group that they form with the sender."""

    def __init__(self, epoch: int, seconds: float) -> None:
        self.epoch = epoch
        self.lines: dict[str, Line] = {}
        self.group: BroadcastGroup | None = None  # None without receivers
        self.held: tuple[int, ...] = ()  # checksums of the buckets that all of them hold; empty: none, or unknown
        self._joined: set[str] = set()
        self._seconds = seconds

    def tell(self, message: Message, what: str) -> None:
        """Send to all; ``what`` begins the error's sentence about lost receivers."""
        lost = {}
        for name, line in self.lines.items():
            try:
                line.send(message)
            except LineClosedError:
                lost[name] = "died or dropped the connection"
        give_up_if(lost, what)

    def hear(self, kind: str, what: str, seconds: float = 0.0) -> None:
        """Wait until all have sent a message with the key ``kind``."""
        give_up_if(collect(self.lines, kind, seconds or self._seconds), what)

    @property
    def joining(self) -> dict[str, Line]:
        """The lines of those that have not told yet that they joined."""
        return {name: line for name, line in self.lines.items() if name not in self._joined}

    def hear_joins(self, what: str, seconds: float) -> None:
        """Wait so long for one that has joined, or for a loss."""
        self._joined |= self._heard(self.joining, "joined", what, seconds)

    def watch(self, what: str, seconds: float) -> None:
        """Wait so long for a loss: for a receiver that ends, or that reports an error before all has been sent."""
        self._heard(self.lines, "done", what, seconds)

    @staticmethod
    def _heard(lines: Mapping[str, Line], kind: str, what: str, seconds: float) -> set[str]:
        """Wait so long for the first messages; returns the receivers whose message has the key ``kind``."""
        waiting = [line for line in lines.values() if line.has_message]
        waiting = waiting or select.select([*lines.values()], [], [], seconds)[0]
        heard = {name: line for name, line in lines.items() if line in waiting}
        if lost := collect(heard, kind, 1.0):  # that whose end starved these may be heard a moment later
            rest = {name: line for name, line in lines.items() if name not in heard}
            give_up_if(lost | collect(rest, kind, GRACE_SECONDS, needed=False), what)
        return set(heard)

    def abort(self) -> list[str]:
        """Tell all that no more will be sent; returns those that give no answer in a moment: they hang."""
        for line in self.lines.values():
            with suppress(LineClosedError):
                line.send({"abort": self.epoch})
        deadline = time.monotonic() + GRACE_SECONDS
        silent = dict(self.lines)
        while silent and (left := deadline - time.monotonic()) > 0:
            answering = select.select([*silent.values()], [], [], left)[0]
            silent = {name: line for name, line in silent.items() if line not in answering}
        return list(silent)

    def hang_up(self) -> None:
        for line in list(self.lines.values()):
            line.hang_up()

    def drop(self) -> None:
        """Close the lines, which the receivers notice; a broadcast that hangs in the group ends at its time-out."""
        for line in self.lines.values():
            line.close()
        if self.group is not None:
            self.group.dispose()
        self.group = None


def give_up_if(lost: Mapping[str, str], what: str) -> None:
    if lost:
        raise LostReceiversError(what, lost)


POLL_SECONDS = 0.002  # between two looks whether a bucket is complete


class CollectiveSender(WeightSender):
    """Rank 0 of each of its groups, which share no receiver: an error in one does not affect the others. A transfer
    goes to the group of the ticket's epoch: send the version, wait until all are ready, broadcast, wait until all are
    done. The loss of a receiver ends its group.

    ``device``: that of the learner's parameters, which decides with the receivers' devices between NCCL and gloo.
    ``bytes_per_second``: the slowest rate that counts as alive; ``timeout_seconds`` is added to it.
    """

    def __init__(
        self, manifest: WeightManifest, *, timeout_seconds: float, device: torch.device | str = "cpu",
        wire: Wire | None = None, bytes_per_second: float = math.inf, sharded: ShardedParams | None = None,
    ) -> None:  # fmt: skip
        super().__init__(manifest, device, wire, sharded)
        self._device = torch.device(device)
        self._timeout_seconds = timeout_seconds
        self._transfer_seconds = timeout_seconds + sum(manifest.bucket_bytes) / bytes_per_second
        self._host = ""
        self._token = new_token()
        self._server: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._members: dict[int, Members] = {}  # by epoch

    def listen(self, host: str = "") -> str:
        self._host = host or own_host()
        self._server = socket.create_server((self._host, 0), backlog=256)
        self._store = dist.TCPStore(
            self._host, 0, None, True, timedelta(seconds=self._timeout_seconds), wait_for_workers=False
        )
        return join_endpoint(self._token, self._host, self._server.getsockname()[1])

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        with self.lock:
            self.epoch = epoch
            for old in list(self._members.values()):
                if not receivers or not old.lines or not old.lines.keys().isdisjoint(receivers):
                    self._drop(old)
            members = self._members[epoch] = Members(epoch, self._timeout_seconds)
            if receivers:
                with self._giving_up(members):
                    self._form(members, list(receivers))

    def close(self) -> None:
        # A thread that waits on a broken line sees its end; that thread, or the code below, closes the lines.
        for members in list(self._members.values()):
            members.hang_up()
        with self.lock:
            for members in list(self._members.values()):
                self._drop(members)
            if self._server is not None:
                self._server.close()
            self._server = self._store = None

    def _check_current(self, ticket: Ticket) -> None:
        present = self.epoch if ticket.epoch not in self._members else ticket.epoch
        if (ticket.version, ticket.epoch) != (self.version, present):
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender holds "
                f"version {self.version} of epoch {self.epoch}."
            )

    def _send(self, ticket: Ticket) -> int:
        members = self._members.get(ticket.epoch)
        if members is None:
            raise WeightSyncError(f"No group to send version {ticket.version} to: connect a new epoch first.")
        outgoing = self.outgoing(members.held)
        if members.group is None:
            return self.payload(outgoing)
        what = f"Version {ticket.version} did not reach every receiver"
        members.held = ()
        self._move_buckets(members.group)
        with self._giving_up(members):
            # Each bucket's number, and the head of its patch if it does not come whole.
            buckets = [[bucket, *(() if patch is None else patch.head)] for bucket, patch in outgoing.items()]
            members.tell({"version": ticket.version, "epoch": ticket.epoch, "buckets": buckets}, what)
            members.hear("ready", what)
            self._broadcast(members, outgoing, what)
            members.hear("done", what, self._transfer_seconds)
            members.group.wait()
        members.held = ticket.checksums
        return self.payload(outgoing)

    def _broadcast(self, members: Members, outgoing: Mapping[int, Patch | None], what: str) -> None:
        """Start all broadcasts. Of buckets that are fetched for them one exists at a time: the next one is fetched when
        the one before has been sent."""
        group = members.group
        assert group is not None
        group.broadcast([])
        deadline = time.monotonic() + self._transfer_seconds
        for place, (bucket, patch) in enumerate(outgoing.items()):
            if place and isinstance(self.buckets, GatheredBuckets):
                self._end_first(members, what, deadline)
            group.begin(self.buckets.tensors[bucket] if patch is None else patch.payload.to(group.device))

    def _end_first(self, members: Members, what: str, deadline: float) -> None:
        """Wait for the oldest broadcast and release its bucket. Raises LostReceiversError."""
        group = members.group
        assert group is not None
        while not group.completed(0):
            members.watch(what, POLL_SECONDS)
            if time.monotonic() > deadline:
                late = f"did not take all buckets within {self._transfer_seconds:.1f} s"
                give_up_if(dict.fromkeys(members.abort() or members.lines, late), what)
        try:
            group.take_first()
        except RuntimeError as error:  # a receiver ended; its control line tells which
            members.hear("done", what)
            raise LostReceiversError(what, {"group": str(error).splitlines()[0]}) from error

    def _move_buckets(self, group: BroadcastGroup) -> None:
        """Keep the snapshot where the group reads it: on the GPU for NCCL, on the host for gloo."""
        if group.device.type != self.buckets.device.type:
            self.buckets = self.buckets.moved(group.device)

    @contextmanager
    def _giving_up(self, members: Members) -> Iterator[None]:
        """Within this context, an error ends the group: its receivers do not wait for the rest."""
        try:
            yield
        except (WeightSyncError, LearnerLostError):
            self._drop(members)
            raise

    def _drop(self, members: Members) -> None:
        members.drop()
        self._members.pop(members.epoch, None)

    def _form(self, members: Members, receivers: list[str]) -> None:
        if self._store is None:
            raise WeightSyncError("The weight sender is not listening: call listen before connect.")
        epoch, what = members.epoch, f"The weight group of epoch {members.epoch} could not form"
        identities = self._accept(members, receivers, what)
        backend = choose_backend([device_identity(self._device), *identities])
        welcome = {"port": self._store.port, "backend": backend, "digest": manifest_digest(self.manifest)}
        chained = self.wire.relay and backend == "gloo"
        members.tell({**welcome, "seconds": self._transfer_seconds, "chained": chained}, what)
        # A connection of its own: a group that never forms keeps it busy until gloo's own time-out.
        own = dist.TCPStore(self._host, self._store.port, None, False, timedelta(seconds=self._timeout_seconds))
        store = dist.PrefixStore(group_keys(self._token, epoch), own)

        def build() -> BroadcastGroup:
            return BroadcastGroup(
                store, backend, 0, len(receivers) + 1, self._host, self._device, self._transfer_seconds, chained
            )

        try:
            group = members.group = formed(build, partial(members.hear_joins, what), self._timeout_seconds)
        except RuntimeError as error:
            lost = collect(members.joining, "joined", 0.1)
            raise LostReceiversError(what, lost or {"group": str(error).splitlines()[0]}) from error
        give_up_if(collect(members.joining, "joined", self._timeout_seconds), what)
        self._move_buckets(group)

    def _accept(self, members: Members, receivers: list[str], what: str) -> list[str]:
        """Accept the receivers' connections until all are there; returns their devices. Rejects an old epoch's and
        strangers."""
        assert self._server is not None
        identities: dict[str, str] = {}

        def expected(hello: Message) -> bool:
            name, rank = hello.get("name"), hello.get("rank")
            return hello.get("epoch") == members.epoch and name in receivers and receivers.index(name) + 1 == rank

        for line, hello in admit(self._server, self._token, expected, self._timeout_seconds):
            name = hello["name"]
            if name in members.lines:
                members.lines[name].close()
            members.lines[name] = line
            identities[name] = str(hello.get("device"))
            if len(identities) == len(receivers):
                break
        missing = {
            name: f"did not join within {self._timeout_seconds:g} s" for name in receivers if name not in identities
        }
        give_up_if(missing, what)
        return [identities[name] for name in receivers]
