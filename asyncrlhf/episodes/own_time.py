"""The time limit of an episode, which stands still while a turn of it waits to be sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from asyncrlhf.episodes.row import Sample
from asyncrlhf.types import GenerationRequest, Rollout


class OwnTime:
    """As ``asyncio.timeout(seconds)``, of the time that the episode's environment or agent takes itself. ``seen`` is
    called with the beginning and the end of each stretch of it, by the loop's clock."""

    def __init__(self, seconds: float, seen: Callable[[float, float], None] = lambda began, ended: None) -> None:
        self._limit = asyncio.timeout(seconds)
        self._seen = seen
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()  # of the present stretch
        self._left = seconds  # at its beginning
        self._sampled = 0  # turns under way: an agent may ask for several at a time
        self._over = False

    async def __aenter__(self) -> OwnTime:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sampled:
            self._seen(self._began, self._clock())
        self._over = True
        await self._limit.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        return self._limit.expired()

    def around(self, sample: Sample) -> Sample:
        """``sample``, while which the clock stands still."""

        async def sampled(request: GenerationRequest) -> Rollout:
            self._count(1)
            try:
                return await sample(request)
            finally:
                self._count(-1)

        return sampled

    def _count(self, more: int) -> None:
        before, self._sampled = self._sampled, self._sampled + more
        if self._over or self.expired() or (before and self._sampled):
            return
        now = self._clock()
        if before:
            self._began = now
            self._limit.reschedule(now + self._left)
        else:
            self._seen(self._began, now)
            self._left -= now - self._began
            self._limit.reschedule(None)
