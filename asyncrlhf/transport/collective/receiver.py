"""The receiver of the transport over process groups: a rank from 1 on, which takes a whole version into staging memory
or one bucket after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.collective.control_line import Line, LineClosedError, Message, dial, split_endpoint
from asyncrlhf.transport.collective.group import BroadcastGroup, device_identity, formed, group_keys
from asyncrlhf.transport.manifest import entries_by_bucket, manifest_digest, view_of
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import Staging, WeightReceiver, check_bucket
from asyncrlhf.transport.sparse import Head

POLL_SECONDS = 0.002  # between two looks whether a bucket is complete


@dataclass(eq=False)
class _Membership:
    """A receiver's part in one group. ``staging``: its own, for a broadcast that hangs may still write into it."""

    epoch: int
    line: Line
    staging: Staging
    group: BroadcastGroup | None = None
    digest: str = ""

    def end(self) -> None:
        self.line.close()
        if self.group is not None:
            self.group.dispose()
        self.group = None
        self.staging.drop()


class CollectiveReceiver(WeightReceiver):
    """Member of one group at a time. A call that still waits in the group before, whose sender may have died, ends
    when the next ``connect`` begins, and touches nothing of the new group."""

    def __init__(self, *, timeout_seconds: float = 120.0, device: torch.device | str = "cpu") -> None:
        super().__init__(timeout_seconds=timeout_seconds, device=device)
        self._membership: _Membership | None = None
        self._change = threading.Lock()  # of the membership
        self.shares = False  # whether staged weights are in memory that neighbours may map

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self.close()
        super().connect(endpoint, rank, world_size, epoch, name)
        mine: _Membership | None = None
        try:
            mine = _Membership(epoch, dial(endpoint, self._timeout_seconds), Staging(name, self.shares))
            self._enter(mine)
            self._join(mine, endpoint, rank, world_size, name)
        except (OSError, RuntimeError, LineClosedError) as error:
            if mine is not None:
                self._leave(mine)
            reason = str(error).splitlines()[0] if str(error) else "the sender refused it or died"
            raise WeightSyncError(
                f"Receiver {name} could not join the weight group of epoch {epoch}: {reason}."
            ) from error

    def _join(self, mine: _Membership, endpoint: str, rank: int, world_size: int, name: str) -> None:
        token, host, _ = split_endpoint(endpoint)
        hello = {"name": name, "rank": rank, "epoch": mine.epoch, "device": device_identity(self._device)}
        mine.line.send({"token": token, **hello})
        welcome = mine.line.poll(self._timeout_seconds)
        if welcome is None:
            raise TimeoutError(f"the sender did not answer within {self._timeout_seconds:g} s")
        mine.digest = welcome["digest"]

        def build() -> BroadcastGroup:
            store = dist.TCPStore(host, welcome["port"], None, False, timedelta(seconds=self._timeout_seconds))
            keys = dist.PrefixStore(group_keys(token, mine.epoch), store)
            own, seconds = mine.line.local_host, welcome["seconds"]
            chained = bool(welcome.get("chained"))
            return BroadcastGroup(keys, welcome["backend"], rank, world_size, own, self._device, seconds, chained)

        mine.group = formed(build, mine.line.poll, self._timeout_seconds)  # its end is the sender's: it says nothing
        mine.line.send({"joined": mine.epoch})

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        with self._taking_part(ticket) as (mine, group):
            line, staged = mine.line, mine.staging
            begin = self._agree(ticket, mine)
            staging, _ = staged.begin(ticket, group.device)
            coming = [(bucket, Head(*head) if head else None) for bucket, *head in begin["buckets"]]
            rooms = [
                staging.tensors[bucket]
                if head is None
                else torch.empty(head.nbytes, dtype=torch.uint8, device=group.device)
                for bucket, head in coming
            ]
            line.send({"ready": ticket.version})
            group.after_compute()  # which may still zero the staging memory, or load the version before from it
            group.broadcast(rooms)
            for place, (bucket, head) in enumerate(coming):
                self._wait_for(place, ticket, line, group)
                group.wait_one(place)
                if head is not None:
                    staged.patch(ticket, bucket, head, rooms[place], staged.content(bucket))
                staged.verify(ticket, bucket)
            group.wait()
            weights = staged.finish(ticket)
            line.send({"done": ticket.version})
            return weights

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        with self._taking_part(ticket) as (mine, group):
            coming = [bucket for bucket, *_ in self._agree(ticket, mine)["buckets"]]  # whole: nothing is kept here
            entries = entries_by_bucket(ticket.manifest)
            mine.line.send({"ready": ticket.version})
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
                self._wait_for(0, ticket, mine.line, group)
                group.take_first()
                bucket = arriving.popleft()
                views = {entry.name: view_of(entry, bucket) for entry in entries[coming[place]]}
                check_bucket(ticket, coming[place], entries[coming[place]], views, mine.staging.name)
                yield views
                del bucket, views
            mine.line.send({"done": ticket.version})

    def _wait_for(self, place: int, ticket: Ticket, line: Line, group: BroadcastGroup) -> None:
        while not group.completed(place):
            if line.poll(POLL_SECONDS) is not None:
                raise WeightSyncError(f"The sender aborted version {ticket.version}.")

    def close(self) -> None:
        if (present := self._membership) is not None:
            self._leave(present)

    @contextmanager
    def _taking_part(self, ticket: Ticket) -> Iterator[tuple[_Membership, BroadcastGroup]]:
        """Within this context, an error ends the membership, and the sender is told the cause."""
        mine = self._membership
        group = None if mine is None else mine.group
        if mine is None or group is None:
            raise WeightSyncError(f"No group to receive version {ticket.version} from: connect first.")
        try:
            yield mine, group
        except GeneratorExit:  # the reader of the stream gave up
            self._leave(mine)
            raise
        except (RuntimeError, LineClosedError, WeightSyncError) as error:
            own = isinstance(error, WeightSyncError)  # else a neighbour in the group ended
            with suppress(LineClosedError):  # unless the sender gave up first
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                mine.line.send({"error" if own else "starved": reason})
            self._leave(mine)
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"Version {ticket.version} was lost on its way: the sender's group ended.") from error

    def _agree(self, ticket: Ticket, mine: _Membership) -> Message:
        """Check, before any byte is sent, that the sender will send exactly the ticket's version."""
        begin = mine.line.poll(self._timeout_seconds)
        if begin is None:
            raise WeightSyncError(
                f"The sender did not begin version {ticket.version} within {self._timeout_seconds:g} s."
            )
        if (begin.get("version"), begin.get("epoch")) != (ticket.version, mine.epoch) or ticket.epoch != mine.epoch:
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the sender sends version "
                f"{begin.get('version')} of epoch {begin.get('epoch')} to a receiver of epoch {mine.epoch}."
            )
        if manifest_digest(ticket.manifest) != mine.digest:
            raise WeightSyncError(f"The manifest of the ticket for version {ticket.version} is not the sender's.")
        return begin

    def _enter(self, mine: _Membership) -> None:
        """Make this the present membership, unless a later call has connected meanwhile."""
        with self._change:
            if mine.epoch != self._epoch:
                raise LineClosedError
            self._membership = mine

    def _leave(self, mine: _Membership) -> None:
        """End the membership, also one that is no longer the present one."""
        with self._change:
            if self._membership is mine:
                self._membership = None
        mine.end()
