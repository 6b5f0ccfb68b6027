"""The process in which a user's reward function runs: ``python -m asyncrlhf.rewards.sandbox_child FD KEY TARGET``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.guard import CallLog, call_function, load_target

WATCH_SECONDS = 0.25
PR_SET_PDEATHSIG = 1  # of prctl(2)


def main(descriptor: int, key: str, target: str) -> None:
    """Answer calls until the other end closes. The first message back is None, or the ConfigError of the import.

    A call has two answers: None when it is taken, and its scores with what was logged, or the RewardError.
    """
    os.set_inheritable(descriptor, False)  # or a process that the function leaves behind would keep it open
    # A function that hangs would outlive a parent that was killed.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="watch").start()
    end_a_second_after_the_parent()
    with Connection(descriptor) as connection:
        try:
            function = load_target(target, key)
        except ConfigError as error:
            connection.send(error)
            return
        connection.send(None)
        while True:
            try:
                columns = connection.recv()
            except EOFError:
                return
            connection.send(None)
            try:
                log = CallLog(len(columns["prompts"]))
                connection.send((call_function(function, columns, log), log.metrics, log.extras))
            except RewardError as error:
                connection.send(RewardError(str(error)))  # without its cause, which may not travel


def _end_with(parent: int) -> None:
    """End this process, and all that the function started, as soon as the parent is gone."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.killpg(0, signal.SIGKILL)


def end_a_second_after_the_parent() -> None:
    """Where a function keeps Python's lock (a regular expression that takes for ever), no thread gets to see the
    parent's end. So the kernel tells this process of it by SIGHUP, whose number is 1, and the handler is the C
    library's ``alarm``: called with that number it has SIGALRM end the process one second later, without Python."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.signal(signal.SIGHUP, ctypes.cast(library.alarm, ctypes.c_void_p))
        library.prctl(PR_SET_PDEATHSIG, signal.SIGHUP)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
