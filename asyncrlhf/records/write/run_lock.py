"""A lock that lets one process at a time write the directory of a run or of a sweep."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path

from asyncrlhf.errors import ConfigError

LOCK_FILE = ".lock"


class RunLock:
    """Held from construction to :meth:`release`, or to the end of the process: the kernel releases its lock (``flock``)
    however the owner ends, so that a dead owner's lock never remains.

    The file names the owner for the sentence that refuses a second process (ConfigError), and stays in the folder. On a
    network file system the lock holds between machines if that supports ``flock`` (NFS since Linux 2.6.12).
    """

    def __init__(self, run_dir: Path, setting: str = "run_dir") -> None:
        """``setting``: the one that chooses the directory, for the refusal."""
        self._file = (run_dir / LOCK_FILE).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._owner()
            self._file.close()
            raise ConfigError(
                f"{run_dir} is being written by {owner}; wait for its end, or give another {setting}."
            ) from None
        self._file.truncate(0)
        since = datetime.now().isoformat(sep=" ", timespec="seconds")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, self._file)
        self._file.flush()

    def _owner(self) -> str:
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read())
            return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (ValueError, KeyError, TypeError):  # it has just begun, or the file is not a lock of ours
            return "another process"

    def release(self) -> None:
        """A second call does nothing."""
        self._file.close()


def is_owned(run_dir: Path) -> bool:
    """Whether a process holds the run's lock, on this machine or, if the file system supports ``flock``, on another."""
    try:
        with (run_dir / LOCK_FILE).open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
