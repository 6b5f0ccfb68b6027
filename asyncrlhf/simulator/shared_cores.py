"""Simulated cores: while more threads work than there are cores, each gets an equal share of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from asyncrlhf.cluster.clock import Signal

TOLERANCE = 1e-9  # CPU seconds


@dataclass(frozen=True)
class Cores:
    """The cores of one machine.

    Args:
        shared: number of cores that the parts share; less than whole ones if other processes need some of them.
        learner: threads of the learner among them; 0: it has cores of its own.
        cold: CPU seconds that each second of waiting for a core adds, because its caches have other threads' data then.
    """

    shared: float
    learner: int = 0
    cold: float = 0.0


class SharedCores:
    """Processor sharing. The speed of all threads is constant between two calls of ``before``, which is called before
    each change of it; ``after`` is called afterwards."""

    def __init__(self, cores: Cores, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._cores, self._cold, self._before, self._after = cores.shared, cores.cold, before, after
        self._threads = 0
        self._changed = Signal()

    @property
    def share(self) -> float:
        """CPU seconds that each thread gets per second."""
        return min(1.0, self._cores / max(1, self._threads))

    @property
    def warm_share(self) -> float:
        """Of them those that a thread without pauses would need for the same work; at least half."""
        return max(self.share / 2, self.share - self._cold * (1.0 - self.share))

    def add(self, threads: int) -> None:
        """So many more threads work from now on; negative: fewer."""
        same = max(self._threads, self._threads + threads) <= self._cores
        if not same:
            self._before()
        self._threads += threads
        if not same:
            self._changed.notify()
            self._after()

    async def compute(self, seconds: float, threads: int = 1) -> None:
        """Take ``seconds`` of CPU time in each of ``threads`` threads."""
        loop = asyncio.get_running_loop()
        self.add(threads)
        try:
            while seconds > TOLERANCE:
                began, share = loop.time(), self.share
                timer = loop.call_at(began + seconds / share, self._changed.notify)
                await self._changed.wait_past(self._changed.count)
                timer.cancel()
                seconds -= (loop.time() - began) * share
        finally:
            self.add(-threads)
