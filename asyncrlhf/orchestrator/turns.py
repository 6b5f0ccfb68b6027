"""Turn-taking on shared devices: the generators on the learner's devices sleep while it trains.

learner    ──train──┐        ┌──train──┐        Generators must be awake to load a step's weights, so the next
                    │ wake   │ sleep   │        turn begins only when they hold them; a replica that died is
generator  (sleeps) └─sample─┘ (sleeps)└─…      started again between two turns, when the device is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import Runtime
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
    async def learner(self) -> AsyncIterator[None]:
        """The learner's turn: in this context the generators on its devices sleep. After an error they stay asleep."""
        if not self._runtime.sharing:
            yield
            return
        await self._settled()
        self.training = True
        try:
            await self._all(GeneratorWorker.sleep)
            yield
        finally:
            self.training = False
        await self._all(GeneratorWorker.wake)
        self._state.changed.notify()

    async def wake(self) -> None:
        """Wake the generators after a turn in which the learner died."""
        if self._runtime.sharing:
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

    async def _all(self, method: Callable[[GeneratorWorker], None]) -> None:
        sharing = [r for r in self._state.replicas if r.name in self._runtime.sharing]
        self._fresh -= {r.name for r in sharing if r.alive}
        sharing = [r for r in sharing if r.alive or r.name in self._fresh]
        seconds = self._state.config.weights.timeout_seconds
        await asyncio.gather(*(self._state.heard(r, r.handle.call(seconds, method)) for r in sharing))
