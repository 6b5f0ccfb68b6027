"""A call that hangs, and time limits that pass exactly then: tests of limits that depend on no clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from asyncrlhf.rewards import model_thread

SECONDS = 60.0  # after which a test fails that waits for what does not come


class Hanging:
    """Stands for whatever never comes back. Everything else is within its time, however slow the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, for_ever: bool = False) -> None:
        self._hangs = threading.Event()
        self._released = threading.Event()
        self._for_ever = for_ever
        self.limits: list[float] = []  # those that passed
        monkeypatch.setattr(model_thread, "wait", self._wait)

    def hang(self) -> None:
        self._hangs.set()
        if not self._released.wait(SECONDS):
            raise TimeoutError("nobody released the call that hangs")
        self._released.clear()
        self._hangs.clear()

    def release(self) -> None:
        """Let the call that hangs come to its end, and wait for that."""
        self._released.set()
        until(lambda: not self._hangs.is_set(), "the end of the call that hung")

    def _wait(self, event: threading.Event, seconds: float | None) -> bool:
        until(lambda: event.wait(0.002) or (seconds is not None and self._hangs.is_set()), "a call's end")
        if event.is_set():
            return True
        assert seconds is not None
        self.limits.append(seconds)
        if not self._for_ever:
            self.release()
        return False


def until(condition: Callable[[], object], missing: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {SECONDS:g} s: {missing}")
        time.sleep(0.001)
