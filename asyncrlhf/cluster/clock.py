"""Virtual time for the local runtime: an event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrlhf.errors import StallError

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Ends every wait at once and advances the virtual clock by the time of the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise StallError("every part of the run waits for another one and no timer is set: a deadlock.")
        self.now += max(timeout, 0.0)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Deterministic: without threads and sockets, the order of events depends on the program alone.

    Raises :class:`StallError` out of ``run_until_complete`` when no further event is possible.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # asyncio treats timers within the clock's resolution as due; the virtual clock is exact.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now

    def go_on_at(self, seconds: float) -> None:
        """Set the clock of a continued run: rounding of summed times depends on their size, and the winner of a tie
        must not depend on when the process began."""
        self._jumping.now = seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a new virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


async def off_loop(action: Callable[[], T]) -> T:
    """Run a blocking action, such as file I/O, in a thread beside the event loop. On the virtual clock it runs in
    place, takes no time, and the order of events stays the program's."""
    if isinstance(asyncio.get_running_loop(), VirtualClockLoop):
        return action()
    return await asyncio.to_thread(action)


class Signal:
    """Wakes every waiter at each notification; each then tests its own condition. Single-threaded, no lost wake-up.

    ``parts``: narrower signals, which are notified with this one. ``count``: notifications so far.
    """

    def __init__(self, *parts: Signal) -> None:
        self.count = 0
        self._parts = parts
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for part in self._parts:
            part.notify()

    async def wait_past(self, count: int) -> None:
        """Wait until there have been more than ``count`` notifications."""
        await self.wait_for(lambda: self.count > count)

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition()`` is true; it may be called any number of times and must change nothing."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
