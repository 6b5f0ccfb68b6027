"""Transport over a process group of its own, NCCL or gloo: the sender broadcasts bucket after bucket.

Receivers take a whole version into staging memory. Beside the group the sender has a control line to each of them.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import LearnerLostError, WeightSyncError
from asyncrlhf.transport.gathered_buckets import GatheredBuckets
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
from asyncrlhf.transport.manifest import ShardedParams, entries_by_bucket, manifest_digest, view_of
from asyncrlhf.transport.members import Members, give_up_if
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.transport.receiver import WeightReceiver, check_bucket
from asyncrlhf.transport.sender import WeightSender, Wire
from asyncrlhf.types import WeightManifest


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
            self.epoch, self.sent = epoch, ()
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

    def _send(self, ticket: Ticket, outgoing: list[int]) -> None:
        members = self._members.get(ticket.epoch)
        if members is None:
            raise WeightSyncError(f"No group to send version {ticket.version} to: connect a new epoch first.")
        if members.group is None:
            return
        what = f"Version {ticket.version} did not reach every receiver"
        self.sent = ()
        self._move_buckets(members.group)
        with self._giving_up(members):
            members.tell({"version": ticket.version, "epoch": ticket.epoch, "buckets": outgoing}, what)
            members.hear("ready", what)
            self._broadcast(members, outgoing, what)
            members.hear("done", what, self._transfer_seconds)
            members.group.wait()

    def _broadcast(self, members: Members, outgoing: list[int], what: str) -> None:
        """Start all broadcasts. Of buckets that are fetched for them one exists at a time: the next one is fetched when
        the one before has been sent."""
        group = members.group
        assert group is not None
        group.broadcast([])
        deadline = time.monotonic() + self._transfer_seconds
        for place, bucket in enumerate(outgoing):
            if place and isinstance(self.buckets, GatheredBuckets):
                self._end_first(members, what, deadline)
            group.begin(self.buckets.tensors[bucket])

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
        members.tell({**welcome, "seconds": self._transfer_seconds}, what)
        try:
            group = members.group = BroadcastGroup(
                dist.PrefixStore(_keys(self._token, epoch), self._store),
                backend, 0, len(receivers) + 1, self._host, self._device, self._transfer_seconds,
            )  # fmt: skip
            group.rehearse(self._timeout_seconds)
        except RuntimeError as error:
            lost = collect(members.lines, "joined", 0.1)
            raise LostReceiversError(what, lost or {"group": str(error).splitlines()[0]}) from error
        members.hear("joined", what)
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


def _keys(token: str, epoch: int) -> str:
    """The prefix of the keys of a group's store: a stranger can connect to torch's store, but cannot guess it."""
    return f"{token}/epoch{epoch}"


POLL_SECONDS = 0.002  # seconds between two checks whether a bucket is complete


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
                raise TimeoutError(f"the sender did not answer within {self._timeout_seconds:g} s")
            self._digest = welcome["digest"]
            store = dist.TCPStore(host, welcome["port"], None, False, timedelta(seconds=self._timeout_seconds))
            self._group = BroadcastGroup(
                dist.PrefixStore(_keys(token, epoch), store),
                welcome["backend"], rank, world_size, self._line.local_host, self._device, welcome["seconds"],
            )  # fmt: skip
            self._group.rehearse(self._timeout_seconds)
            self._line.send({"joined": epoch})
        except (OSError, RuntimeError, LineClosedError) as error:
            self._drop_group()
            reason = str(error).splitlines()[0] if str(error) else "the sender refused it or died"
            raise WeightSyncError(f"{what}: {reason}.") from error

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        with self._taking_part(ticket) as (line, group):
            begin = self._agree(ticket, line)
            staging, _ = self._staged.begin(ticket, group.device)
            coming = list(begin["buckets"])
            line.send({"ready": ticket.version})
            group.broadcast([staging.tensors[bucket] for bucket in coming])
            for place, bucket in enumerate(coming):
                self._wait_for(place, ticket, line, group)
                group.wait_one(place)
                self._staged.verify(ticket, bucket)
            group.wait()
            weights = self._staged.finish(ticket)
            line.send({"done": ticket.version})
            return weights

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        with self._taking_part(ticket) as (line, group):
            coming = list(self._agree(ticket, line)["buckets"])
            entries = entries_by_bucket(ticket.manifest)
            line.send({"ready": ticket.version})
            group.broadcast([])
            arriving: deque[torch.Tensor] = deque()
            for place in range(-1, len(coming)):
                if place + 1 < len(coming):  # the next one arrives while this one is loaded
                    size = ticket.manifest.bucket_bytes[coming[place + 1]]
                    arriving.append(torch.empty(size, dtype=torch.uint8, device=group.device))
                    group.after_compute()
                    group.begin(arriving[-1])
                if place < 0:
                    continue
                self._wait_for(0, ticket, line, group)
                group.take_first()
                bucket = arriving.popleft()
                views = {entry.name: view_of(entry, bucket) for entry in entries[coming[place]]}
                check_bucket(ticket, coming[place], entries[coming[place]], views, self._staged.name)
                yield views
                del bucket, views
            line.send({"done": ticket.version})

    def _wait_for(self, place: int, ticket: Ticket, line: Line, group: BroadcastGroup) -> None:
        while not group.completed(place):
            if line.poll(POLL_SECONDS) is not None:
                raise WeightSyncError(f"The sender aborted version {ticket.version}.")

    def close(self) -> None:
        self._drop_group()

    @contextmanager
    def _taking_part(self, ticket: Ticket) -> Iterator[tuple[Line, BroadcastGroup]]:
        """Within this context, an error ends the group, and the sender is told the cause."""
        line, group = self._line, self._group
        if line is None or group is None:
            raise WeightSyncError(f"No group to receive version {ticket.version} from: connect first.")
        try:
            yield line, group
        except GeneratorExit:  # the reader of the stream gave up
            self._drop_group()
            raise
        except (RuntimeError, LineClosedError, WeightSyncError) as error:
            with suppress(LineClosedError):  # unless the sender gave up first
                line.send({"error": str(error).splitlines()[0] if str(error) else type(error).__name__})
            self._drop_group()
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"Version {ticket.version} was lost on its way: the sender's group ended.") from error

    def _agree(self, ticket: Ticket, line: Line) -> Message:
        """Check, before any byte is sent, that the sender will send exactly the ticket's version."""
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
        """Drop the group and staging memory: a broadcast that hangs in the old group may still write into it."""
        if self._line is not None:
            self._line.close()
        if self._group is not None:
            self._group.dispose()
        self._line = self._group = None
        self._staged.drop()
