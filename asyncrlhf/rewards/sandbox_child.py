"""The process in which a user's reward function runs: ``python -m`` this module with ``FD KEY TARGET FOLDER LIMITS``.

It is sent pickles by its parent, and answers in JSON alone: what a function sends must not run in its parent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.guard import WrongCountError, call_function, load_target
from asyncrlhf.rewards.limits import begin_call, confine
from asyncrlhf.rewards.reward_config import SandboxConfig

WATCH_SECONDS = 1.0


def main(descriptor: int, key: str, target: str, folder: str, limits: SandboxConfig) -> None:
    """Answer calls until the other end closes. The first message back is empty, or the sentence of a ConfigError.

    A call has two answers: an empty one when it is taken, and its scores or the sentence of a RewardError. Calls run in
    ``folder``, the import in the working directory.
    """
    os.set_inheritable(descriptor, False)  # or a process that the function leaves behind would keep it open
    with Connection(descriptor) as connection:

        def tell(**message: Any) -> None:
            connection.send_bytes(json.dumps(message).encode())

        try:
            confine(limits)
            # A function that hangs would outlive a parent that was killed.
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="watch").start()
            function = load_target(target, key)
        except ConfigError as error:
            tell(error=str(error))
            return
        os.chdir(folder)
        tell()
        while True:
            try:
                columns = connection.recv()
            except EOFError:
                return
            tell()
            begin_call(limits)
            try:
                scores = call_function(function, columns)
            except RewardError as error:
                tell(error=str(error), wrong_count=isinstance(error, WrongCountError))
            else:
                tell(scores=[{"error": str(s)} if isinstance(s, RewardError) else s for s in scores])


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    number, named, function_name, own_folder, limited = sys.argv[1:]
    main(int(number), named, function_name, own_folder, SandboxConfig(**json.loads(limited)))
