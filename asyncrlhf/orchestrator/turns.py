"""Turn-taking on shared devices: the generators on the learner's devices sleep while it trains, and the learner sleeps
while they sample.

learner    ──train, snapshot──┐ (sleeps)┌──…    A step's weights are loaded by generators that are awake, so the
                              │ wake    │       next turn begins only when they hold them; a replica that died is
generator  (sleeps)           └──sample─┘ …     started again between two turns, when the device is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, Runtime
from asyncrlhf.orchestrator.state import Replica, RunState


class Turns:
    """Does nothing for replicas with devices of their own.

    ``published`` waits until no weights are on their way. A replica that takes longer than
    ``weights.timeout_seconds`` to sleep or wake counts as dead.
    """

    def __init__(self, state: RunState, runtime: Runtime, published: Callable[[], Awaitable[None]]) -> None:
        self._state = state
        self._runtime = runtime
        self._published = published
        self._starting: set[str] = set()
        self._fresh: set[str] = set()  # started again; not counted as alive before they have weights
        self.training = False

    @asynccontextmanager
    async def learner(self, *, publishes: bool = False) -> AsyncIterator[None]:
        """The learner's turn: no generator on its devices samples inside. When it fails they sleep on; the run ends.
        ``publishes``: new weights are sure to follow, so that a generator need not keep its own meanwhile."""
        if not self._runtime.sharing:
            yield
            return
        await self._settled()
        self.training = True
        try:
            await self._all(GeneratorWorker.sleep, not publishes)
            if self._offloads:
                await self._runtime.learner.every(LONG_SECONDS, LearnerWorker.wake)
            yield
        except BaseException:
            self.training = False
            raise
        await self.wake()

    @property
    def _offloads(self) -> bool:
        return bool(self._runtime.sharing) and self._state.config.offloads

    @asynccontextmanager
    async def weights(self) -> AsyncIterator[None]:
        """What reads or replaces the learner's weights between two turns needs one where they are not on the device."""
        if not self._offloads:
            yield
            return
        async with self.learner():
            yield

    async def free(self) -> None:
        """The learner is about to start again: its devices are to be free for it, until :meth:`wake`."""
        self.training = bool(self._runtime.sharing)
        await self._all(GeneratorWorker.sleep, True)

    async def wake(self) -> None:
        """The end of a turn, also of one that the learner did not survive."""
        if self._runtime.sharing:
            if self._offloads:
                await self._runtime.learner.every(LONG_SECONDS, LearnerWorker.sleep)
            self.training = False
            await self._all(GeneratorWorker.wake)
            self._state.changed.notify()

    @asynccontextmanager
    async def start_of(self, replica: Replica) -> AsyncIterator[None]:
        """A fresh replica loads its model: the device is the generators' inside."""
        if replica.name not in self._runtime.sharing:
            yield
            return
        await self._state.changed.wait_for(lambda: not self.training)
        self._starting.add(replica.name)
        try:
            yield
        finally:
            self._starting.discard(replica.name)
            self._fresh.add(replica.name)
            self._state.changed.notify()

    async def _settled(self) -> None:
        """Wait until no weights are on their way and no replica is being started."""
        await self._published()
        while self._starting:
            await self._state.changed.wait_for(lambda: not self._starting)
            await self._published()

    async def _all(self, method: Callable[..., None], *arguments: bool) -> None:
        sharing = [r for r in self._state.replicas if r.name in self._runtime.sharing]
        self._fresh -= {r.name for r in sharing if r.alive}
        sharing = [r for r in sharing if r.alive or r.name in self._fresh]
        seconds = self._state.config.weights.timeout_seconds
        await asyncio.gather(*(self._state.heard(r, r.handle.call(seconds, method, *arguments)) for r in sharing))
