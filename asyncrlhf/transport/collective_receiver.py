"""The receivers' side of the collective transport: a whole version, bucket after bucket, into staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.control import Line, LineClosedError, Message, dial, split_endpoint
from asyncrlhf.transport.group import BroadcastGroup, device_identity
from asyncrlhf.transport.manifest import manifest_digest
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver

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
            self._give_up(line, str(error).splitlines()[0] if str(error) else type(error).__name__)
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

    def _give_up(self, line: Line, reason: str) -> None:
        """Tell the sender that this process is alive and why it stopped, if the sender still listens."""
        with suppress(LineClosedError):  # the sender gave up first
            line.send({"error": reason})
        self._drop_group()

    def _drop_group(self) -> None:
        """Staging memory goes too: a broadcast that hangs in the old group may still write into it."""
        if self._line is not None:
            self._line.close()
        if self._group is not None:
            self._group.dispose()
        self._line = self._group = None
        self._staged.drop()
