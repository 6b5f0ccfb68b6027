"""The receivers' side of the collective transport: a whole version into staging memory, or bucket after bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.checksum import entries_by_bucket, verify_bucket
from asyncrlhf.transport.control import Line, LineClosedError, Message, dial, split_endpoint
from asyncrlhf.transport.group import BroadcastGroup, device_identity
from asyncrlhf.transport.live import bucket_buffer, bucket_views
from asyncrlhf.transport.manifest import manifest_digest
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.staging import Staging

POLL_SECONDS = 0.002  # how often a receiver looks whether a bucket is complete


class CollectiveReceiver:
    """A rank from 1 on. ``device``: where the engine's parameters live."""

    def __init__(self, *, timeout_seconds: float, device: torch.device | str = "cpu") -> None:
        self._timeout_seconds = timeout_seconds
        self._device = torch.device(device)
        self._epoch = -1
        self._digest = ""
        self._line: Line | None = None
        self._group: BroadcastGroup | None = None
        self._staged = Staging()
        self._buffers: list[torch.Tensor] = []

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self._drop_group()
        self._epoch, self._staged.name = epoch, name
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

    def stream(self, ticket: Ticket) -> Iterator[Mapping[str, torch.Tensor]]:
        """Through two buffers, each as large as a bucket: one is loaded while the next is filled."""
        with self._taking_part(ticket) as (line, group):
            self._agree(ticket, line)
            self._buffers = self._buffers or [bucket_buffer(ticket.manifest, group.device) for _ in range(2)]
            entries, notes = entries_by_bucket(ticket.manifest), _Notes(line, ticket.version, self._timeout_seconds)
            pieces = [self._buffers[i % 2][:size] for i, size in enumerate(ticket.manifest.bucket_bytes)]
            line.send({"ready": ticket.version})
            group.start(pieces[0])
            for bucket, piece in enumerate(pieces):
                if bucket + 1 < len(pieces):
                    group.start(pieces[bucket + 1])  # its buffer was given back when this bucket was asked for
                checksum = notes.checksum(bucket)
                while not group.completed(bucket):
                    notes.look(POLL_SECONDS)
                group.wait_one(bucket)
                views = bucket_views(entries[bucket], piece)
                if checksum is not None:
                    verify_bucket(bucket, entries[bucket], views, checksum, ticket.version, self._staged.name)
                yield views
                line.send({"took": bucket})
            group.wait()

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
        except GeneratorExit:
            self._give_up(line, f"the engine took only a part of version {ticket.version}")
            raise

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
        self._buffers = []


class _Notes:
    """What the sender says of the buckets that it streams, which may come before or after their bytes."""

    def __init__(self, line: Line, version: int, timeout_seconds: float) -> None:
        self._line, self._version, self._timeout_seconds = line, version, timeout_seconds
        self._checksums: dict[int, int | None] = {}

    def checksum(self, bucket: int) -> int | None:
        """Of ``bucket``, None when the sender takes none. Raises WeightSyncError when nothing comes in time."""
        if bucket not in self._checksums:
            self.look(self._timeout_seconds)
        if bucket not in self._checksums:
            raise WeightSyncError(
                f"The sender did not send bucket {bucket} of version {self._version} within "
                f"{self._timeout_seconds:g} s."
            )
        return self._checksums.pop(bucket)

    def look(self, seconds: float) -> None:
        """Take the next message, if one comes within ``seconds``."""
        message = self._line.poll(seconds)
        if message is None:
            return
        if "bucket" not in message:
            raise WeightSyncError(f"The sender broke off version {self._version}.")
        self._checksums[message["bucket"]] = message["checksum"]
