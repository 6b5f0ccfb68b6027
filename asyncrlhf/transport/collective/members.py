"""The sender's side of one weight group: its receivers, and the control lines to them."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from contextlib import suppress

from asyncrlhf.transport.collective.control_line import GRACE_SECONDS, Line, LineClosedError, Message, collect
from asyncrlhf.transport.collective.group import BroadcastGroup
from asyncrlhf.transport.protocol import LostReceiversError


class Members:
    """The receivers of one epoch: a control line to each, and the process group that they form with the sender."""

    def __init__(self, epoch: int, seconds: float) -> None:
        self.epoch = epoch
        self.lines: dict[str, Line] = {}
        self.group: BroadcastGroup | None = None  # None without receivers
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
