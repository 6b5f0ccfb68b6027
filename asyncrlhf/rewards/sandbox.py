"""A user's reward function in a process of its own: one that hangs or kills its process costs a rollout, no worker.

It keeps accidents away, not malice: the function runs with the worker's rights and files.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.reward import Logged, RewardSource, Score, columns_of
from asyncrlhf.types import Rollout

START_SECONDS = 120.0  # for the imports of the user's module
STANDARD_ERROR = 2


class SandboxSource(RewardSource):
    """Starts its process at once, and again after each call that had to be ended.

    Raises ConfigError with one sentence when the target cannot be imported, is no function or takes other arguments.
    """

    def __init__(self, target: str, key: str, timeout_seconds: float) -> None:
        self._target = target
        self._key = key
        self._timeout = timeout_seconds
        self._child: _Child | None = _Child(target, key)
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
            raise RewardError(
                f"The reward function took longer than reward.timeout_seconds={self._timeout:g}."
            ) from error
        except (EOFError, OSError) as error:
            end = child.end()
            self.close()
            raise RewardError(f"The reward function ended its process ({end}).") from error
        if isinstance(answer, RewardError):
            raise answer
        scores, metrics, extras = answer
        self._logged |= {r.rollout_id: (metrics, extra) for r, extra in zip(rollouts, extras, strict=True)}
        return list(scores)

    def logged(self) -> dict[int, Logged]:
        found, self._logged = self._logged, {}
        return found

    def _running(self) -> _Child:
        """The child, or a new one where the last call, or something from outside, ended it."""
        if self._child is None or not self._child.alive:
            self.close()
            try:
                self._child = _Child(self._target, self._key)
            except ConfigError as error:
                raise RewardError(f"The reward function could not be started again: {error}") from error
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    """The process and the socket to it."""

    def __init__(self, target: str, key: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # What this process can import, the child can.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrlhf.rewards.sandbox_child", str(theirs.fileno()), key, target],
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,  # a function that prints does not end up in what a command prints
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that it can be ended with all that it started, and Ctrl-C passes it by
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection)
        try:
            started = self.receive(START_SECONDS)
        except (TimeoutError, EOFError, OSError) as error:
            late = isinstance(error, TimeoutError)
            end = f"took longer than {START_SECONDS:g} s" if late else f"ended the process ({self.end()})"
            self.close()
            raise ConfigError(f"{key}={target}: the import {end}.") from error
        if started is not None:
            self.close()
            raise started

    @property
    def alive(self) -> bool:
        """Between two calls nothing is to be read but the end of a process that the system has not buried yet."""
        return self._process.poll() is None and not self._connection.poll()

    def takes(self, columns: dict[str, list[Any]]) -> bool:
        """Hand the arguments of a call over; false when the process ended before it had them."""
        try:
            self._connection.send(columns)
            self.receive(START_SECONDS)
        except (TimeoutError, EOFError, OSError):
            return False
        return True

    def receive(self, seconds: float) -> Any:
        """The next message. Raises TimeoutError, or EOFError or OSError when the process ended."""
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv()

    def end(self) -> str:
        """How the process ended, for a message."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        self._finalizer()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    if process.poll() is None:
        # Its own session is a group of its own: what the function started ends with it.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
