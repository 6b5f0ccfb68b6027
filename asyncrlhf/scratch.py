"""Folders in the temporary folder that go with the process that made them: at its end, or after its death."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_SECONDS = 5.0  # for processes that are ending, and still write into the folder


class Scratch:
    """A new folder, until :meth:`close`. A lock shows that its owner lives: it is released if the owner is killed, and
    the next folder of that prefix removes this one.

    ``place``: the folder above it, by default the system's temporary folder.
    """

    def __init__(self, prefix: str, place: str | None = None) -> None:
        remove_abandoned(prefix, place)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            with suppress(BlockingIOError, FileNotFoundError):  # another process found it before it had its lock
                self._lock = _locked(self.path)
                if self.path.is_dir():
                    return
                os.close(self._lock)

    @contextmanager
    def of_processes(self) -> Iterator[None]:
        """Processes that start meanwhile have this as their temporary folder: what they leave there goes with it."""
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.path)
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._lock < 0:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        shutil.rmtree(self.path, ignore_errors=True)
        while self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def remove_abandoned(prefix: str, place: str | None = None) -> None:
    """Remove this user's folders of that prefix whose owners were killed: their locks are free."""
    for folder in Path(place or tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            lock = _locked(folder)
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int:
    """The open folder with its lock. Raises BlockingIOError if another process has the lock."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
