"""The process in which a user's reward function runs: ``python -m asyncrlhf.rewards.sandbox_child FD KEY TARGET``."""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.guard import CallLog, call_function, load_target

WATCH_SECONDS = 1.0


def main(descriptor: int, key: str, target: str) -> None:
    """Answer calls until the other end closes. The first message back is None, or the ConfigError of the import.

    A call has two answers: None when it is taken, and its scores with what was logged, or the RewardError.
    """
    os.set_inheritable(descriptor, False)  # or a process that the function leaves behind would keep it open
    # A function that hangs would outlive a parent that was killed.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="watch").start()
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
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
