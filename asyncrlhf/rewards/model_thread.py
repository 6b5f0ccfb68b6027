"""The thread of a reward worker's models, and the limit of its callers' waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from asyncrlhf.rewards.reward import StuckError, late

T = TypeVar("T")
SETTING = "reward.model_timeout_seconds"


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        self.begun.set()
        try:
            if not self.given_up:
                self.value = self.work()
        except BaseException as error:
            self.error = error
        self.ended.set()


class ModelThread:
    """Runs one call after the other. Python cannot stop a call that hangs, but its caller stops waiting for it.

    All models of a worker share one: OpenMP has a team of threads for each calling thread, and with more than one
    team it no longer spins between kernels. ``seconds=None``: no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._calls: SimpleQueue[_Call | None] | None = None

    def call(self, who: str, work: Callable[[], T], remedy: str = "") -> T:
        """Return or raise what ``work`` does; raise StuckError, with ``who`` as subject, after ``seconds``.
        First waits, at most as long, for an earlier call that was given up. ``remedy``: a sentence for a user whose
        call is only slow."""
        return self._call(who, work, self.seconds, remedy)

    def call_without_limit(self, work: Callable[[], T]) -> T:
        """As :meth:`call`, for slow work such as loading: the start of a worker has a limit of its own."""
        return self._call("", work, None, "")

    def _call(self, who: str, work: Callable[[], T], seconds: float | None, remedy: str) -> T:
        if self._calls is None:
            self._calls = SimpleQueue()
            # A daemon: a hanging thread must not keep the process alive.
            threading.Thread(target=_serve, args=(self._calls,), daemon=True, name="reward-models").start()
        call = _Call(work)
        self._calls.put(call)
        if not wait(call.begun, seconds):
            call.given_up = True
            raise StuckError(f"{who} did not begin within {SETTING}={seconds:g}: an earlier call hangs.")
        if not wait(call.ended, seconds):
            assert seconds is not None
            raise StuckError(f"{late(who, seconds, SETTING)} {remedy}".strip())
        error, call.error = call.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or the error and its frames would keep each other alive, and a pass's memory with them
        value: T = call.value
        return value

    def close(self) -> None:
        """End the thread after its current call; a later call starts another."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def wait(event: threading.Event, seconds: float | None) -> bool:
    """Whether ``event`` comes within ``seconds``."""
    return event.wait(seconds)


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # or it would hold on to tensors until the next one
