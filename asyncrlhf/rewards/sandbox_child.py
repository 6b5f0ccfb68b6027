"""The process of a user's reward function: ``python -m`` this module with ``FD KEY TARGET FOLDER LIMITS``.

It gets pickles from its parent, and answers only in JSON, so that a function cannot run code in the parent.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.plugins import load_function
from asyncrlhf.rewards.confinement import confine, end_with_the_parent, guard
from asyncrlhf.rewards.guard import CallLog, WrongCountError, call_function
from asyncrlhf.rewards.reward_config import SandboxConfig


def main(descriptor: int, key: str, target: str, folder: str, limits: SandboxConfig) -> None:
    """Answer calls until the other end closes. The first message back is empty, or the sentence of a ConfigError.

    A call has two answers: an empty one when it starts, and its scores with the log, or the sentence of a
    RewardError. Calls run in ``folder``, the import in the working directory.
    """
    os.set_inheritable(descriptor, False)  # or a process that the function leaves behind would keep it open
    with Connection(descriptor) as connection:

        def tell(**message: Any) -> None:
            connection.send_bytes(json.dumps(message).encode())

        try:
            confine(limits)
            guard(descriptor, folder)
            end_with_the_parent()
            function = load_function(key, target)
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
            try:
                log = CallLog(len(columns["prompts"]))
                scores = call_function(function, columns, log)
            except RewardError as error:
                tell(error=str(error), wrong_count=isinstance(error, WrongCountError))
            else:
                plain = [{"error": str(s)} if isinstance(s, RewardError) else s for s in scores]
                tell(scores=plain, metrics=log.metrics, extras=log.extras)


if __name__ == "__main__":
    number, named, function_name, own_folder, limited = sys.argv[1:]
    main(int(number), named, function_name, own_folder, SandboxConfig(**json.loads(limited)))
