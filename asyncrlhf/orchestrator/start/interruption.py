"""The effect of SIGINT (Ctrl-C), SIGTERM and SIGHUP on a run: the first ends it in order, the second at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from asyncrlhf.last_words import seen

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Within this context each of the signals raises KeyboardInterrupt. Without effect outside of the main thread,
    which alone may set handlers, and for a signal that the process was started to ignore (``nohup``)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def _interrupt(number: int, frame: FrameType | None) -> None:
    seen(number)
    raise KeyboardInterrupt


@contextmanager
def in_order(stop: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """Within this context the first signal calls ``stop`` and passes the sentence that it returns to ``say``; the next
    signal, of any kind, raises KeyboardInterrupt. For the running loop of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heeded = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]

    # Handlers of Python, not of the loop: the second signal acts also while something blocks the loop (Ray's start).
    def first(number: int, _: FrameType | None) -> None:
        seen(number)
        end_at_once()
        loop.call_soon_threadsafe(end_in_order)

    def end_in_order() -> None:
        say(f"{stop()} A second signal (Ctrl-C) ends at once.")

    def end_at_once() -> None:
        for number in heeded:
            signal.signal(number, _interrupt)

    for number in heeded:
        signal.signal(number, first)
    try:
        yield
    finally:
        end_at_once()
