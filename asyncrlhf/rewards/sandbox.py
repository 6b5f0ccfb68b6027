"""A user's reward function in a separate process: if it hangs or kills its process, a rollout fails, not the worker.

It protects from accidents, not from malice: the function runs with the worker's rights and files (docs/security.md).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.redaction import is_secret, redact
from asyncrlhf.rewards.guard import WrongCountError
from asyncrlhf.rewards.reward import LateError, Logged, RewardSource, Score, columns_of, late
from asyncrlhf.rewards.reward_config import SandboxConfig
from asyncrlhf.scratch import Scratch
from asyncrlhf.types import Rollout

START_SECONDS = 120.0  # for the imports of the user's module
STANDARD_ERROR = 2
LOOK_SECONDS = 0.05  # between two counts of a function's processes
GUARDS = 1  # processes of ours below it
ANSWER_BYTES = 64 << 20
FOLDER = "asyncrlhf-function-"  # in the temporary folder, prefix of the functions' own folders
MOST_ENDED = 10_000  # limit of processes ended at once, because a function may start them endlessly


class SandboxSource(RewardSource):
    """Starts its process at once, and again after each call that ended it.

    Raises ConfigError with one sentence when the target cannot be imported, is not a function or takes other arguments.
    """

    in_process = True

    def __init__(self, target: str, key: str, timeout_seconds: float, limits: SandboxConfig | None = None) -> None:
        self._target = target
        self._key = key
        self._timeout = timeout_seconds
        self._limits = limits or SandboxConfig()
        self._child: _Child | None = _Child(target, key, self._limits)
        self._logged: dict[int, Logged] = {}

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        columns = columns_of(rollouts)
        child = self._running()
        try:
            if not child.takes(columns):  # it was ended from outside: no fault of these rollouts
                self.close()
                child = self._running()
                child.takes(columns)
            answer = child.receive(self._timeout)
        except TimeoutError as error:
            self.close()
            raise LateError(late("The reward function", self._timeout)) from error
        except (EOFError, OSError) as error:
            end = child.end()
            self.close()
            raise RewardError(f"The reward function ended its process ({end}).") from error
        except TooMuchError:
            self.close()
            raise
        if "error" in answer:
            raise (WrongCountError if answer.get("wrong_count") else RewardError)(answer["error"])
        try:
            scores = [RewardError(score["error"]) if isinstance(score, dict) else score for score in answer["scores"]]
            metrics = {str(name): float(value) for name, value in answer["metrics"].items()}
            extras = [dict(extra) for extra in answer["extras"]]
            logged = {r.rollout_id: (metrics, extra) for r, extra in zip(rollouts, extras, strict=True)}
        except (AttributeError, LookupError, TypeError, ValueError):  # written by the function itself
            self.close()
            raise TooMuchError("The reward function's process answered something else than scores.") from None
        self._logged |= logged
        return scores

    def logged(self) -> dict[int, Logged]:
        found, self._logged = self._logged, {}
        return found

    def _running(self) -> _Child:
        """The child process, or a new one if the last one ended."""
        if self._child is None or not self._child.alive:
            self.close()
            try:
                self._child = _Child(self._target, self._key, self._limits)
            except ConfigError as error:
                raise RewardError(f"The reward function could not be started again: {error}") from error
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class TooMuchError(RewardError):
    """The function exceeded a limit, and its process was ended."""


class _Child:
    """The process, the socket to it and the folder that it runs in."""

    def __init__(self, target: str, key: str, limits: SandboxConfig) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._limits = limits
        scratch = Scratch(FOLDER)
        folder = str(scratch.path)
        # What this process can import, the child can.
        paths = os.pathsep.join(path for path in sys.path if path)
        variables = {**environment(limits, os.environ), "PYTHONPATH": paths, "TMPDIR": folder}
        module, words = "asyncrlhf.rewards.sandbox_child", (key, target, folder, json.dumps(asdict(limits)))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *words],
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,  # the function's output must not mix with the command's
                env=variables,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that it can be ended with all its children, and does not get Ctrl-C
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, scratch)
        try:
            started = self.receive(START_SECONDS)
        except (TimeoutError, EOFError, OSError) as error:
            late = isinstance(error, TimeoutError)
            end = f"took longer than {START_SECONDS:g} s" if late else f"ended the process ({self.end()})"
            self.close()
            raise ConfigError(f"{key}={target}: the import {end}.") from error
        if "error" in started:
            self.close()
            raise ConfigError(started["error"])

    @property
    def alive(self) -> bool:
        """Whether the process runs and its connection has nothing to read. Between two calls only a process that has
        ended makes the connection readable, and the system may still list that process as running."""
        return self._process.poll() is None and not self._connection.poll()

    def takes(self, columns: dict[str, list[Any]]) -> bool:
        """Send the arguments of a call; returns False if the process ended before it had them."""
        try:
            self._connection.send(columns)
            self.receive(START_SECONDS)
        except (TimeoutError, EOFError, OSError):
            return False
        return True

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, EOFError or OSError when the process ended, and TooMuchError."""
        deadline, allowed = time.monotonic() + seconds, self._limits.processes
        while not self._connection.poll(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            started = len(list(islice(descendants(self._process.pid), allowed + GUARDS + 1))) - GUARDS
            if started > allowed:
                raise TooMuchError(f"The reward function started more than reward.sandbox.processes={allowed}.")
        with suppress(ValueError, RecursionError):
            message = json.loads(self._connection.recv_bytes(ANSWER_BYTES))
            if isinstance(message, dict):
                return message
        raise TooMuchError("The reward function's process answered something else than scores.")

    def end(self) -> str:
        """How the process ended, for a message."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        self._finalizer()


def environment(config: SandboxConfig, variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without those that hold secrets, by their name or by credentials in their value, unless
    ``reward.sandbox.env`` lists them."""
    hidden = (name for name, value in variables.items() if is_secret(name) or redact(value) != value)
    left_out = set(hidden) - set(config.env)
    return {name: value for name, value in variables.items() if name not in left_out}


def descendants(pid: int) -> Iterator[int]:
    """Processes below ``pid``, as far as the system tells."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):  # ended meanwhile
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)


def _end(process: subprocess.Popen[bytes], connection: Connection, scratch: Scratch) -> None:
    connection.close()
    if process.poll() is None:
        # Those that left its group first, while they are still to be found below it.
        for left in islice(descendants(process.pid), MOST_ENDED):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(left, signal.SIGKILL)
        # Its session is one process group, so the function's children end with it.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    scratch.close()
