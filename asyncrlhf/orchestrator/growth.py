"""Growth: when machines join the cluster, generators are started on them and take part from the next moment on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.handles import Runtime
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.orchestrator.weight_sync import WeightPublisher

LOOK_SECONDS = 3.0  # between two looks at the cluster; twice as long after each start that failed
LONGEST_WAIT = 300.0


class Growth:
    """``joined`` is told of a replica that holds weights and may be given work."""

    def __init__(
        self,
        state: RunState,
        runtime: Runtime,
        publisher: WeightPublisher,
        message: Callable[[str], None],
        joined: Callable[[Replica], None],
    ) -> None:
        self._state = state
        self._runtime = runtime
        self._publisher = publisher
        self._message = message
        self._joined = joined

    async def run(self) -> None:
        """Look for room now and then, for as long as the run goes."""
        pause = LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                grown = not self._state.stopping and await self._grow()
            except ReplicaError as error:
                pause = min(2 * pause, LONGEST_WAIT)
                self._message(f"A replica more could not be started; the next try is in {pause:g} s. Cause: {error}")
                continue
            pause = 0.0 if grown else LOOK_SECONDS

    async def _grow(self) -> bool:
        """Start one replica where there is room, and bring it to the version of the others."""
        handle = await self._runtime.add_generator([r.name for r in self._state.replicas])
        if handle is None:
            return False
        replica = Replica(handle, alive=False)  # no member of a weight group before it rejoins
        self._state.replicas.append(replica)
        await self._publisher.rejoin(replica)
        if replica.alive:
            self._message(f"{replica.name} joined at version {replica.version}.")
            self._joined(replica)
            self._state.progressed()
        return True
