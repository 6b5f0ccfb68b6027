"""Transport through a shared file system: the sender writes safetensors files, receivers read them when complete.

No network joins the learner to its replicas but the one that brings the tickets. Whether all see one folder is found
out when a group forms: every receiver leaves its answer there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import torch
from safetensors import SafetensorError

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.disk_files import (
    ANSWERS,
    MANIFEST,
    VersionWriter,
    answer_file,
    folder_name,
    missing_parts,
    read_bucket,
    read_json,
    take_over,
    write_json,
)
from asyncrlhf.transport.gather import entries_by_bucket
from asyncrlhf.transport.manifest import copy_tensors
from asyncrlhf.transport.protocol import LostReceiversError, Ticket, TransferStats
from asyncrlhf.transport.snapshot import SnapshotHolder, Wire
from asyncrlhf.transport.staging import Staging, payload_bytes
from asyncrlhf.types import WeightManifest

POLL_SECONDS = 0.01
T = TypeVar("T")


def wait_for(look: Callable[[], T | None], seconds: float) -> T | None:
    """Look until there is something, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


class Shelf:
    """The sender's folder of versions: the newest, the one before it while a receiver may still read it, the receivers'
    answers. One thread at a time uses it.
    """

    def __init__(self, root: Path, manifest: WeightManifest, timeout_seconds: float) -> None:
        self.newest: Path | None = None  # the newest complete version
        self._root = root
        self._manifest = manifest
        self._entries = entries_by_bucket(manifest)
        self._timeout_seconds = timeout_seconds
        self._claim: IO[str] | None = None
        self._receivers: list[str] = []

    def open(self) -> str:
        self._claim = take_over(self._root)
        return str(self._root)

    def form(self, receivers: list[str], epoch: int) -> None:
        """Wait until each receiver has left its answer. Raises LostReceiversError naming those that did not."""
        if self._claim is None:
            raise WeightSyncError("The weight sender does not listen: call listen before connect.")
        absent = set(receivers)

        def look() -> bool | None:
            absent.difference_update([name for name in absent if self._answer(name).get("epoch") == epoch])
            return None if absent else True

        wait_for(look, self._timeout_seconds)
        if absent:
            reason = f"left no answer in {self._root / ANSWERS} within {self._timeout_seconds:g} s"
            lost = {name: reason for name in receivers if name in absent}
            raise LostReceiversError(f"The weight group of epoch {epoch} could not form", lost)
        self._receivers = receivers

    def write(
        self, version: int, name: str, bucket: Callable[[int], Mapping[str, torch.Tensor]],
        checksums: Callable[[], Sequence[int]], unchanged: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Write a version as the folder ``name``. ``bucket`` gives a bucket's tensors; ``checksums`` is asked last;
        ``unchanged`` are the buckets that the newest version holds already. Raises WeightSyncError when the disk
        refuses."""
        self.sweep()
        writer = VersionWriter(self._root, name, self._manifest)
        try:
            writer.begin()
            for index in range(len(self._entries)):
                if not (index in unchanged and self.newest is not None and writer.add_same(index, self.newest)):
                    writer.add(index, bucket(index))
            self.newest = writer.publish(version, checksums())
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"Version {version} cannot be written to {self._root}: {error}.") from error
        finally:
            writer.discard()

    def sweep(self) -> None:
        """Remove the versions before the newest once every receiver of the group has the newest."""
        if self.newest is None or any(self._answer(n).get("folder") != self.newest.name for n in self._receivers):
            return
        for folder in self._root.glob("v*-*"):
            if folder != self.newest and folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()
        self._claim = None

    def _answer(self, name: str) -> dict[str, object]:
        return read_json(answer_file(self._root, name)) or {}


class DiskSender(SnapshotHolder):
    """Writes its snapshot in ``transfer``, beside the learner's next step; receivers read when all of it is there."""

    def __init__(
        self, manifest: WeightManifest, root: Path, *, timeout_seconds: float, device: torch.device | str = "cpu",
        wire: Wire | None = None,
    ) -> None:  # fmt: skip
        super().__init__(manifest, device, wire)
        self._shelf = Shelf(root, manifest, timeout_seconds)
        self._entries = entries_by_bucket(manifest)
        self._name = ""

    def listen(self, host: str = "") -> str:
        return self._shelf.open()

    def connect(self, endpoint: str, receivers: Sequence[str], epoch: int) -> None:
        self._shelf.form(list(receivers), epoch)
        with self.lock:
            self.epoch = epoch

    def prepare(self) -> None:
        self._name = ""

    def ticket(self) -> Ticket:
        self.settle()
        with self.lock:
            self._name = self._name or folder_name(self.newest())
            return self.new_ticket((self._name,))

    def transfer(self, ticket: Ticket) -> TransferStats:
        with self.lock:
            self.check_current(ticket)
            started, outgoing = time.perf_counter(), self.outgoing()
            if self._shelf.newest is None or self._shelf.newest.name != self._name:
                unchanged = frozenset(range(len(self._entries))) - frozenset(outgoing)
                self._shelf.write(ticket.version, self._name, self._bucket, lambda: self.checksums, unchanged)
                self.sent = self.checksums
            return TransferStats(
                time.perf_counter() - started, payload_bytes(self.manifest, outgoing), self.stall_seconds
            )

    def close(self) -> None:
        self._shelf.close()

    def _bucket(self, bucket: int) -> Mapping[str, torch.Tensor]:
        views = self.buckets.views()
        return {entry.name: views[entry.name].cpu() for entry in self._entries[bucket]}


class DiskReceiver:
    """Answers in the sender's folder, under its name, when it joins a group and when it has a version."""

    def __init__(self, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._root: Path | None = None
        self._epoch = -1
        self._staged = Staging()

    def connect(self, endpoint: str, rank: int, world_size: int, epoch: int, name: str) -> None:
        self._root, self._epoch, self._staged.name = Path(endpoint), epoch, name
        self._answer(None)

    def receive(self, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        staging, wanted = self._staged.begin(ticket)
        folder, entries = self._folder(ticket), entries_by_bucket(ticket.manifest)
        views = staging.views()
        for bucket in wanted:
            with read_bucket(folder, bucket, entries[bucket], len(entries)) as tensors:
                copy_tensors({name: views[name] for name in tensors}, tensors)
            self._staged.verify(ticket, bucket)
        weights = self._staged.finish(ticket)
        self._answer(folder)
        return weights

    def close(self) -> None:
        self._staged.drop()

    def _folder(self, ticket: Ticket) -> Path:
        """Of the ticket's version, when it is complete. Raises WeightSyncError naming what is missing after the
        time-out, or what does not fit."""
        if self._root is None:
            raise WeightSyncError(f"No group to receive version {ticket.version} from: connect first.")
        if ticket.epoch != self._epoch:
            raise WeightSyncError(
                f"The ticket is for version {ticket.version} of epoch {ticket.epoch}, but the receiver is of epoch "
                f"{self._epoch}."
            )
        folder = self._root / ticket.refs[0]
        facts = wait_for(lambda: read_json(folder / MANIFEST), self._timeout_seconds)
        if facts is None:
            raise WeightSyncError(
                f"Version {ticket.version} is not complete in {self._root} after {self._timeout_seconds:g} s: "
                f"{missing_parts(folder, len(ticket.manifest.bucket_bytes))}."
            )
        tensors = [[e.name, list(e.shape), e.dtype, e.bucket] for e in ticket.manifest.tensors]
        if (facts["version"], facts["tensors"]) != (ticket.version, tensors):
            raise WeightSyncError(f"The manifest of the ticket for version {ticket.version} is not that of {folder}.")
        return folder

    def _answer(self, folder: Path | None) -> None:
        assert self._root is not None
        answer = {"epoch": self._epoch, "folder": folder.name if folder is not None else None}
        try:
            write_json(answer_file(self._root, self._staged.name), answer)
        except OSError as error:
            raise WeightSyncError(
                f"{self._staged.name} cannot write to {self._root / ANSWERS}: {error}; weights.disk_path must be the "
                f"same folder on all machines."
            ) from error
