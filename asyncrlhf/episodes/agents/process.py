"""The agent of one episode as a process of its own, from its start to the last line of its output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrlhf.episodes.environment import EpisodeError

TAIL = 2**16  # bytes of an output that are kept
LAST_SECONDS = 1.0  # for the rest of the output of a process that has ended
SHOWN = 300  # characters of its last line in a message


async def run_agent(command: Sequence[str], base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
    """The value in the last line of the process's output; None if that is no JSON. Raises EpisodeError if the process
    cannot be started or fails. However it ends, no process of it is left."""
    told = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # what older clients read
        "OPENAI_API_KEY": api_key,
        "ASYNCRLHF_ROW": json.dumps(row, default=str),
    }
    try:
        transport, process = await asyncio.get_running_loop().subprocess_exec(
            _Output, *command, stdin=subprocess.DEVNULL, env={**os.environ, **told},
            start_new_session=True,  # so that it can be ended with all its children
        )  # fmt: skip
    except OSError as error:
        raise EpisodeError(f"The agent's command cannot be started: {error.strerror or error}.") from error
    number = transport.get_pid()
    try:
        await process.exited.wait()
        _kill(number)  # what it left would hold its output open
        with suppress(TimeoutError):
            await asyncio.wait_for(process.closed.wait(), LAST_SECONDS)
    finally:
        _kill(number)
        await process.exited.wait()
        transport.close()
    out, err = process.last_line(1), process.last_line(2)
    code = transport.get_returncode()
    if code != 0:
        raise EpisodeError(f"The agent's command ended with exit code {code}: {err[:SHOWN] or 'it said nothing'}")
    try:
        return json.loads(out)
    except (ValueError, RecursionError):
        return None


class _Output(asyncio.SubprocessProtocol):
    """What a process wrote, of which no more than the tail is held, and whether it has ended."""

    def __init__(self) -> None:
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._tails = {1: b"", 2: b""}

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._tails[fd] = (self._tails[fd] + data)[-TAIL:]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def last_line(self, fd: int) -> str:
        """The last line with a character."""
        lines = [line for line in self._tails[fd].decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def _kill(number: int) -> None:
    """End a process group, also after its leader's end: no other group gets the number while a member is left."""
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
