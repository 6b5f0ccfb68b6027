"""A process group for the transport, separate from torch.distributed's default group, and its disposal.

A control line joins the sender to each receiver: one TCP connection, one JSON object per line. It carries what the
transfer itself cannot: which receivers are there, which refused, and, when a connection ends, which died. Any process
can connect to the sender's port; :func:`admit` rejects those without the run's token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GLOO_THREADS = 4  # broadcasts in flight at once; measured best for buckets of 4 to 64 MB to two receivers


def device_identity(device: torch.device) -> str:
    """A text that two ranks share only if they share one accelerator; ``cpu`` for all CPUs."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def choose_backend(identities: list[str]) -> str:
    """NCCL when every rank has an accelerator of its own (NCCL refuses two ranks on one), else gloo."""
    alone = len(set(identities)) == len(identities)
    return "nccl" if alone and all(i.startswith("cuda") for i in identities) and dist.is_nccl_available() else "gloo"


class BroadcastGroup:
    """Rank 0 broadcasts to all others. ``host``: this rank's address as the others reach it (gloo)."""

    def __init__(
        self, store: dist.Store, backend: str, rank: int, size: int, host: str, device: torch.device, seconds: float
    ) -> None:
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._works: list[Any] = []
        self._stream = torch.cuda.Stream(device) if backend == "nccl" else None
        # Longer than the control lines' limit: these know which receiver is silent, while a broadcast that fails first
        # would be reported by an innocent receiver.
        last_resort = timedelta(seconds=2 * seconds + 2)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = last_resort
            with torch.cuda.device(device):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()  # type: ignore[attr-defined]
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = last_resort
            options._threads = GLOO_THREADS
            self._group = gloo(store, rank, size, options)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Start the broadcasts, one per tensor, in order; returns at once."""
        self._works = []
        for tensor in tensors:
            self.begin(tensor)

    def begin(self, tensor: torch.Tensor) -> None:
        """Start one more broadcast; returns at once."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._own_stream():
            self._works.append(self._group.broadcast([tensor], options))

    def after_compute(self) -> None:
        """Let broadcasts that begin from here on wait for the device's present work, which may still read their
        memory."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def completed(self, place: int) -> bool:
        """Whether one broadcast has ended, with or without success; never blocks."""
        return bool(self._works[place].is_completed())

    def wait_one(self, place: int) -> None:
        """As ``wait``, for one broadcast."""
        with self._own_stream():
            self._works[place].wait()
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self) -> None:
        """Block, without the GIL, until the broadcasts have ended; raises RuntimeError when one failed."""
        for place in range(len(self._works)):
            self.wait_one(place)
        self._works = []

    def take_first(self) -> None:
        """Wait for the oldest broadcast, then release it and its memory."""
        self.wait_one(0)
        del self._works[0]

    def rehearse(self, seconds: float) -> None:
        """Broadcast one byte, so that connections made at the first broadcast (NCCL) are made now, within a time limit.
        Raises RuntimeError if it fails."""
        ended: list[BaseException | None] = []

        def broadcast() -> None:
            try:
                self.broadcast([torch.zeros(1, dtype=torch.uint8, device=self.device)])
                self.wait()
                ended.append(None)
            except RuntimeError as error:
                ended.append(error)

        thread = threading.Thread(target=broadcast, name="rehearse-weight-group", daemon=True)
        thread.start()
        thread.join(seconds)
        if not ended:
            raise RuntimeError(f"no byte passed within {seconds:g} s")
        if ended[0] is not None:
            raise RuntimeError(str(ended[0])) from ended[0]

    def dispose(self) -> None:
        """Release the group. After the loss of a rank, gloo's destructor waits for unfinished work until the time-out,
        so a thread runs it."""
        held, idle = [self._works, self._group], all(work.is_completed() for work in self._works)
        self._works, self._group = [], None
        if idle:
            held.clear()
        else:
            threading.Thread(target=held.clear, name="dispose-weight-group", daemon=True).start()

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream for NCCL's waits, which would otherwise delay the learner's kernels."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


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
    receivers without an answer by then are not listed.
    """
    waiting = dict(lines)
    lost: dict[str, str] = {}
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
            if message is None or kind not in message:
                reason = "an invalid message" if message is None else message.get("error", message)
                lost[name] = f"answered {reason!r}"
        if lost:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if waiting and not lost and needed:
        lost = {name: f"gave no answer within {seconds:g} s" for name in waiting}
    return lost
