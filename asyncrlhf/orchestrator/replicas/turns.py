"""Turn-taking on shared devices: the generators on the learner's devices sleep while it trains, and the learner sleeps
while they sample.

learner    ──train, snapshot──┐ (sleeps)┌──…    Generators must be awake to load a step's weights, so the next
                              │ wake    │       turn begins only when they hold them; a replica that died is
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
    """Puts replicas on the learner's devices to sleep and wakes them; does nothing for replicas with their own devices.

    ``published`` waits until every live replica holds the newest published weights. A replica that takes longer than
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
        """The learner's turn: in this context the generators on its devices sleep. After an error they stay asleep.
        ``publishes``: a publish certainly follows, so that the generators may drop their weights."""
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
        """A turn of its own for reading or replacing the learner's weights, if a sleeping learner offloads them."""
        if not self._offloads:
            yield
            return
        async with self.learner():
            yield

    async def free(self) -> None:
        """Free the devices for a learner that is about to start again, until :meth:`wake`."""
        self.training = bool(self._runtime.sharing)
        await self._all(GeneratorWorker.sleep, True)

    async def wake(self) -> None:
        """End a turn: the learner sleeps and the generators wake. Also after the learner died in its turn."""
        if self._runtime.sharing:
            if self._offloads:
                await self._runtime.learner.every(LONG_SECONDS, LearnerWorker.sleep)
            self.training = False
            await self._all(GeneratorWorker.wake)
            self._state.changed.notify()

    @asynccontextmanager
    async def start_of(self, replica: Replica) -> AsyncIterator[None]:
        """In this context, between two turns of the learner, a restarted replica may load its model."""
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
        """Wait until no publish is under way and no replica is being started."""
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
