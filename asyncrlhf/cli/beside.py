"""The process beside a script's or a notebook's own, where the Python API trains: it outlives it and speaks for it.

What ``parent.py`` does for a command, as far as a process can that is not the parent: the user's own keeps its
tracebacks, and is neither ended nor started again. Ray's processes end with it by themselves.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrlhf import last_words
from asyncrlhf.cli.parent import LOOK_SECONDS, Told, speak_for
from asyncrlhf.shortages import memory_kills


@contextmanager
def beside() -> Iterator[None]:
    """What this process tells meanwhile is heard by one beside it, unless one above hears it already, or the system has
    no descriptors of processes."""
    if last_words.is_heard() or not hasattr(os, "pidfd_open"):
        yield
        return
    reading, writing = os.pipe()
    line = [sys.executable, "-m", "asyncrlhf.cli.beside", str(os.getpid()), str(reading)]
    package = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    watcher = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, pass_fds=(reading,), env=environment, start_new_session=True
    )
    os.close(reading)
    last_words.heard_by(writing)
    try:
        yield
    finally:
        last_words.tell(ended=0)
        last_words.heard_by(-1)
        os.close(writing)
        watcher.wait()


def watch(process: int, reading: int) -> None:
    """Wait for the process to say that it has ended, or for its end; then speak for it."""
    told, kills = Told(reading), memory_kills()
    with suppress(ProcessLookupError):
        waited_for = [end := os.pidfd_open(process), reading]
        while end not in select.select(waited_for, [], [], LOOK_SECONDS)[0]:
            if not told.read():
                waited_for = [end]
            told.look()
            if "ended" in told.told:
                return
    status = _status(process)
    told.read()
    if "ended" not in told.told:
        speak_for(status, told, memory_kills() > kills)


def _status(process: int) -> int | None:
    """As of waitpid(2), for a process that has ended and whose parent has not asked for it yet."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[49])
    return None


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # it ends with what it watches
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), int(sys.argv[2]))
