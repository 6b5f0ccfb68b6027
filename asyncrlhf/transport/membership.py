"""The sender's side of a weight group: who is in it, a control line to each, and the process group they form."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.control import Line, LineClosedError, Message, collect, own_host
from asyncrlhf.transport.group import BroadcastGroup, choose_backend, device_identity
from asyncrlhf.transport.protocol import LostReceiversError


class Membership:
    """One group at a time. The loss of a receiver ends the group and raises LostReceiversError naming it.

    ``device``: where the learner's parameters live; it decides, with the receivers' devices, between NCCL and gloo.
    """

    def __init__(self, timeout_seconds: float, device: torch.device) -> None:
        self.device = device
        self.group: BroadcastGroup | None = None  # None without receivers
        self.connected = False
        self._timeout_seconds = timeout_seconds
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

    def form(self, receivers: list[str], epoch: int, digest: str) -> None:
        """Drop the group there was and form that of ``epoch``; ``digest``: the manifest's, which all must share."""
        self.drop()
        if receivers:
            self._form(receivers, epoch, digest)
        self.connected = True

    def tell(self, message: Message, what: str) -> None:
        """Send to all; ``what`` begins the sentence about receivers that are lost."""
        lost = {}
        for name, line in self._lines.items():
            try:
                line.send(message)
            except LineClosedError:
                lost[name] = "died or dropped the connection"
        self._give_up_if(lost, what)

    def hear(self, kind: str, what: str) -> None:
        """Wait until all have sent a message with the key ``kind``."""
        self._give_up_if(collect(self._lines, kind, self._timeout_seconds), what)

    def drop(self) -> None:
        """The closed lines tell the receivers; a broadcast that hangs in the old group is left to its time-out."""
        self.connected = False
        for line in self._lines.values():
            line.close()
        self._lines = {}
        if self.group is not None:
            self.group.dispose()
        self.group = None

    def hang_up(self) -> None:
        """End what another thread waits for: its control lines break. That thread, or ``close``, gives them back."""
        for line in list(self._lines.values()):
            line.hang_up()

    def close(self) -> None:
        self.drop()
        if self._server is not None:
            self._server.close()
        self._server = self._store = None

    def _give_up_if(self, lost: Mapping[str, str], what: str) -> None:
        if lost:
            self.drop()
            raise LostReceiversError(what, lost)

    def _form(self, receivers: list[str], epoch: int, digest: str) -> None:
        if self._store is None:
            raise WeightSyncError("The weight sender does not listen: call listen before connect.")
        what = f"The weight group of epoch {epoch} could not form"
        identities = self._accept(receivers, epoch, what)
        backend = choose_backend([device_identity(self.device), *identities])
        self.tell({"port": self._store.port, "backend": backend, "digest": digest}, what)
        try:
            self.group = BroadcastGroup(
                dist.PrefixStore(f"epoch{epoch}", self._store),
                backend, 0, len(receivers) + 1, self._host, self.device, self._timeout_seconds,
            )  # fmt: skip
        except RuntimeError as error:
            lost = collect(self._lines, "joined", 0.1)
            self._give_up_if(lost or {"group": str(error).splitlines()[0]}, what)
        self.hear("joined", what)

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
