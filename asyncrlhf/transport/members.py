"""The sender's side of one weight group: its receivers, and the control lines to them."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from contextlib import suppress

from asyncrlhf.transport.group import GRACE_SECONDS, BroadcastGroup, Line, LineClosedError, Message, collect
from asyncrlhf.transport.protocol import LostReceiversError


class Members:
    """The receivers of one epoch: a control line to each, and the process group that they form with the sender."""

    def __init__(self, epoch: int, seconds: float) -> None:
        self.epoch = epoch
        self.lines: dict[str, Line] = {}
        self.group: BroadcastGroup | None = None  # None without receivers
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

    def watch(self, what: str, seconds: float) -> None:
        """Wait so long for a loss: for a receiver that ends, or that reports an error before all has been sent."""
        waiting = [line for line in self.lines.values() if line.has_message]
        waiting = waiting or select.select([*self.lines.values()], [], [], seconds)[0]
        heard = {name: line for name, line in self.lines.items() if line in waiting}
        if lost := collect(heard, "done", 1.0):  # that whose end starved these may be heard a moment later
            rest = {name: line for name, line in self.lines.items() if name not in heard}
            give_up_if(lost | collect(rest, "done", GRACE_SECONDS, needed=False), what)

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
