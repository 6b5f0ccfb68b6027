"""What ends a run early: signals, and a file in its folder. The first ends it in order, a second signal at once.

SIGINT (Ctrl-C) and SIGHUP come from a user, who can wait. SIGTERM, SIGUSR1 and SIGUSR2 are notices: the machine goes
soon, so that the run has ``checkpoint.notice_seconds`` for its last checkpoint.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from asyncrlhf.last_words import ENDING, seen

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_FILE = "stop"
LOOK_SECONDS = 1.0  # between two looks for that file
_raised = False


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Within this context each of the signals raises KeyboardInterrupt. Without effect outside of the main thread,
    which alone may set handlers, and for a signal that the process was started to ignore (``nohup``)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _raise_what_was_lost()
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, _interrupt)
    global _raised
    try:
        yield
    finally:
        _raised = False
        for number in heeded:
            signal.signal(number, before[number])


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _raised
    if seen(number):
        _raised = True
        raise KeyboardInterrupt


def _raise_what_was_lost() -> None:
    """Python prints and forgets an exception of a finalizer or of a weak reference's callback, which imports have; a
    signal may come while one runs."""
    if _raised:
        raise KeyboardInterrupt


@contextmanager
def in_order(stop: Callable[[bool], str], say: Callable[[str], None]) -> Iterator[None]:
    """Within this context the first signal calls ``stop``, with True for a notice, and passes the sentence that it
    returns to ``say``; the next signal, of any kind, raises KeyboardInterrupt. For the running loop of the main
    thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]

    # Handlers of Python, not of the loop: the second signal acts also while something blocks the loop (Ray's start).
    def first(number: int, _: FrameType | None) -> None:
        if seen(number):
            end_at_once()
            loop.call_soon_threadsafe(end_in_order, number in NOTICES)

    def end_in_order(notice: bool) -> None:
        say(f"{stop(notice)} A second signal (Ctrl-C) ends at once.")

    def end_at_once() -> None:
        for number in heeded:
            signal.signal(number, _interrupt)

    for number in heeded:
        signal.signal(number, first)
    try:
        _raise_what_was_lost()
        yield
    finally:
        end_at_once()


@contextmanager
def by_file(run_dir: Path, found: Callable[[], None]) -> Iterator[None]:
    """Within this context a file ``stop`` in the folder is removed, and ``found`` called in the running loop. A thread
    looks for it: a disk that hangs stops nothing else."""
    loop, closed = asyncio.get_running_loop(), threading.Event()

    def look() -> None:
        while not asked_to_stop(run_dir):
            if closed.wait(LOOK_SECONDS):
                return
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if closed.is_set() else found())

    thread = threading.Thread(target=look, name="stop file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(LOOK_SECONDS)


def asked_to_stop(run_dir: Path) -> bool:
    """Whether the folder holds a file ``stop``, which is removed: the next attempt would meet it again."""
    try:
        (run_dir / STOP_FILE).unlink()
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be removed, or looked for
        return (run_dir / STOP_FILE).is_file()
    return True
