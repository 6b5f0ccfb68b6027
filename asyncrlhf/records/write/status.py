"""``status.json`` of a live run, written by a thread, so that it also works when the event loop hangs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrlhf.records.write.whole_files import write_atomically

STATUS_FILE = "status.json"
SECONDS = 1.0  # between two writings


class StatusFile:
    """Within this context, a thread asks the running event loop every second for the result of ``look`` and writes it,
    with the process id and the time of the loop's last answer; at the end it removes the file.

    ``look`` only reads and takes no time of a virtual clock, so that the order of the run's events does not change.
    """

    def __init__(self, run_dir: Path, look: Callable[[], Mapping[str, Any]]) -> None:
        self._path = run_dir / STATUS_FILE
        self._look = look
        self._seen: dict[str, Any] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(SECONDS)  # a hanging disk must not delay the run's end
        with suppress(OSError):  # the run's own error says more of a disk that can only be read
            self._path.unlink()

    def _answer(self) -> None:
        """Runs in the event loop."""
        self._seen = {**self._look(), "answered": time.time()}

    def _run(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        while not self._closed.is_set():
            text = json.dumps({**owner, "written": time.time(), **self._seen}) + "\n"
            with suppress(OSError):  # the recorder reports a full disk
                write_atomically(self._path, text, lasting=False)
            self._closed.wait(SECONDS)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The file's content; None without a file that a run wrote."""
    try:
        found = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"host", "pid", "written", "step"} <= found.keys() else None
