"""What a run's process tells the one above or beside it (``cli/parent.py``, ``cli/beside.py``), which speaks for it."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

# Signals that end a command in order, each with the one by which the process above passes it on. Numbers of real-time
# signals come last, so that Python calls a handler of the first kind before one of the second.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = {
    number: signal.SIGRTMIN + place for place, number in enumerate(ENDING, start=1) if hasattr(signal, "SIGRTMIN")
}
SAME = 5.0  # seconds within which a signal of this process's own and one that was passed on to it are the same

_pipe, _owner, _code = -1, 0, 0
_seen: dict[int, float] = {}  # own signals, and when
_passed: dict[int, float] = {}  # signals that were passed on, and when
_passing = False
_last: int = signal.SIGINT


def below(pipe: int) -> None:
    """This process has one above it, which reads ``pipe``."""
    heard_by(pipe)
    for passed_on in PASSED_ON.values():
        signal.signal(passed_on, _passed_on)


def heard_by(pipe: int) -> None:
    """A process beside this one reads ``pipe``; -1: none does."""
    global _pipe, _owner
    _pipe, _owner = pipe, os.getpid()


def is_heard() -> bool:
    return _pipe >= 0


def tell(**facts: Any) -> None:
    """Tell the process above. Without effect where there is none, and in further processes."""
    global _code
    _code = facts.get("ended", _code)
    if _pipe >= 0 and os.getpid() == _owner:
        with suppress(OSError):
            os.write(_pipe, (json.dumps(facts) + "\n").encode())


def ended_with() -> int:
    """The exit code that this process told last."""
    return _code


def seen(number: int) -> bool:
    """A handler of a signal says that it was called; returns whether the signal is a new one, and not the own copy of
    one that was passed on before."""
    global _last
    now = time.monotonic()
    if not _passing and now - _passed.pop(number, -SAME) < SAME:
        return False
    _seen[number], _last = now, number
    return True


def none_seen() -> None:
    """A command begins."""
    global _last
    _last = signal.SIGINT


def by_signal() -> int:
    """The exit code of a command that a signal ended, as of a shell: 128 and the number of the last signal. Also where
    the user ended it in another way, which counts as Ctrl-C."""
    return 128 + _last


def _passed_on(number: int, frame: FrameType | None) -> None:
    """A signal to a whole group of processes (from ``timeout``, or a cluster's scheduler) reaches both this one and the
    one above it, which passes it on, in any order: it counts once."""
    global _passing
    own = next(plain for plain, passed_on in PASSED_ON.items() if passed_on == number)
    if time.monotonic() - _seen.pop(own, -SAME) < SAME:
        return
    handler = signal.getsignal(own)
    if callable(handler):
        _passing = True
        try:
            handler(own, frame)
        finally:
            _passing = False
            _seen.pop(own, None)  # it was not this process's own
            _passed[own] = time.monotonic()
    elif handler == signal.SIG_DFL:
        os.kill(os.getpid(), own)
