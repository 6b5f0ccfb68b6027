"""Control lines of the transport over process groups.

A line joins the sender to each receiver: one TCP connection, one JSON object per line. It carries what the transfer
itself cannot: which receivers are there, which refused, and, when a connection ends, which died. Any process can
connect to the sender's port; :func:`admit` rejects those without the run's token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GRACE_SECONDS = 0.5  # after a first loss: time for the others to report, so that all the lost are named at once

MESSAGE_BYTES = 16 << 20  # longest message of a receiver: it may name a million buckets
HELLO_BYTES, HELLO_SECONDS = 4096, 10.0  # for an unknown caller
CALLERS = 128  # silent connections at once; beyond that the oldest is closed

Message = dict[str, Any]


class LineClosedError(Exception):
    """The other process ended, dropped the connection, or sent something that is not a message."""


class Line:
    """One end of a control line. ``local_host``: this side's own address as the other side reaches it. ``longest``: the
    largest message that is accepted, in bytes."""

    def __init__(self, connection: socket.socket, longest: int = MESSAGE_BYTES) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(True)
        self._buffer = b""
        self.longest = longest
        self.local_host: str = connection.getsockname()[0]

    @property
    def has_message(self) -> bool:
        """Whether a complete message was read already, which ``select`` does not see."""
        return b"\n" in self._buffer

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises LineClosedError when the other side has closed the line."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LineClosedError from error

    def poll(self, seconds: float) -> Message | None:
        """The next message, or None if none arrives within ``seconds``. Raises LineClosedError at the end of the
        connection, and for a message that is not a JSON object or longer than ``longest``."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            try:
                if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return None
                received = self._socket.recv(65536)
            except (OSError, ValueError) as error:  # ValueError: closed by our own side meanwhile
                raise LineClosedError from error
            self._buffer += received
            if not received or (b"\n" not in self._buffer[: self.longest + 1] and len(self._buffer) > self.longest):
                raise LineClosedError
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LineClosedError from error
        if not isinstance(message, dict):
            raise LineClosedError
        return message

    def hang_up(self) -> None:
        """End the connection, from any thread; a thread that waits on it sees its end. Its file descriptor stays open
        until ``close``, so that a thread in ``select`` neither fails nor listens to another file of this number."""
        with contextlib.suppress(OSError):  # the other side was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()


def own_host() -> str:
    """The address of this machine's own name, or the loopback if the name has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def new_token() -> str:
    """The secret that a run's receivers show to its sender. It is part of the endpoint, which only Ray transports:
    never a log, an environment or a command line."""
    return secrets.token_hex(16)


def join_endpoint(token: str, host: str, port: int) -> str:
    return f"{token}@{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, str, int]:
    """Token (empty without one), host and port."""
    token, _, address = endpoint.rpartition("@")
    host, _, port = address.rpartition(":")
    return token, host, int(port)


def dial(endpoint: str, seconds: float) -> Line:
    return Line(socket.create_connection(split_endpoint(endpoint)[1:], timeout=seconds))


def admit(
    server: socket.socket, token: str, wanted: Callable[[Message], bool], seconds: float
) -> Iterator[tuple[Line, Message]]:
    """For ``seconds``, yield callers that show the ``token`` and send a ``wanted`` hello, each with its hello. Other
    callers are rejected, and none of them delays the rest."""
    callers: dict[Line, float] = {}  # deadline of each caller's hello, the oldest first
    deadline = time.monotonic() + seconds
    server.setblocking(False)  # a caller may be gone again between select and accept
    try:
        while (now := time.monotonic()) < deadline:
            until = min([deadline, *callers.values()])
            waiting: list[socket.socket | Line] = [server, *callers]
            ready = select.select(waiting, [], [], max(0.0, until - now))[0]
            for line in [line for line in callers if line in ready]:
                try:
                    hello = line.poll(0.0)
                except LineClosedError:
                    hello = {}
                if hello is None:
                    continue  # the rest is still in transit
                del callers[line]
                shown = str(hello.pop("token", "")).encode(errors="replace")
                if hmac.compare_digest(shown, token.encode()) and wanted(hello):
                    line.longest = MESSAGE_BYTES
                    yield line, hello
                else:
                    line.close()
            if server in ready:
                with contextlib.suppress(OSError):  # gone already
                    callers[Line(server.accept()[0], HELLO_BYTES)] = time.monotonic() + HELLO_SECONDS
            late = [line for line, until in callers.items() if until <= time.monotonic()]
            for line in late or list(callers)[: len(callers) - CALLERS]:
                del callers[line]
                line.close()
    finally:
        for line in callers:
            line.close()


def collect(lines: Mapping[str, Line], kind: str, seconds: float, *, needed: bool = True) -> dict[str, str]:
    """Wait until every line has received a message with the key ``kind``; returns the failures by name.

    Empty if there are none. Silence is a failure if the messages are ``needed``. After a first loss the wait ends soon;
    receivers without an answer by then are not listed. One that was ``starved`` by another's end is listed only if no
    other one is.
    """
    waiting = dict(lines)
    lost: dict[str, str] = {}
    starved: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        read_already = [line for line in waiting.values() if line.has_message]
        readable = read_already or select.select(list(waiting.values()), [], [], remaining)[0]
        for name in [name for name, line in waiting.items() if line in readable]:
            try:
                message = waiting.pop(name).poll(1.0)
            except LineClosedError:
                lost[name] = "died or dropped the connection"
                continue
            if message is not None and "starved" in message:
                starved[name] = f"answered {message['starved']!r}"
            elif message is None or kind not in message:
                reason = "an invalid message" if message is None else message.get("error", message)
                lost[name] = f"answered {reason!r}"
        if lost or starved:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    lost = lost or starved
    if waiting and not lost and needed:
        lost = {name: f"gave no answer within {seconds:g} s" for name in waiting}
    return lost
