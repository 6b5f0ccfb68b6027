"""The agent of one episode as a process of its own, from its start to the last line of its output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrlhf.episodes.environment import EpisodeError

TAIL = 2**16  # bytes of an output that are kept
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
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, env={**os.environ, **told},
            start_new_session=True,  # so that it can be ended with all its children
        )  # fmt: skip
    except OSError as error:
        raise EpisodeError(f"The agent's command cannot be started: {error.strerror or error}.") from error
    reading = [asyncio.ensure_future(_last_line(stream)) for stream in (process.stdout, process.stderr)]
    try:
        code = await process.wait()
        _kill(process)  # what it left would hold its output open
        out, err = [await line for line in reading]
    finally:
        for line in reading:
            line.cancel()
        _kill(process)
        await process.wait()
    if code != 0:
        raise EpisodeError(f"The agent's command ended with exit code {code}: {err[:SHOWN] or 'it said nothing'}")
    try:
        return json.loads(out)
    except (ValueError, RecursionError):
        return None


def _kill(process: Process) -> None:
    """End its process group, also after its own end: no other group gets the number while a member is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _last_line(stream: asyncio.StreamReader | None) -> str:
    """The last line with a character; no more than the tail of an output is held."""
    assert stream is not None
    tail = b""
    while piece := await stream.read(TAIL):
        tail = (tail + piece)[-TAIL:]
    lines = [line for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
