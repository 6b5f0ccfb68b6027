"""Replicas that come and go: a dead one is restarted and its rollouts issued again; machines bring new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.orchestrator.turns import Turns
from asyncrlhf.orchestrator.weight_sync import WeightPublisher


class Recovery:
    """``dead`` may be called by any loop that met the death, any number of times; the work is done once."""

    def __init__(self, state: RunState, runtime: Runtime, message: Callable[[str], None]) -> None:
        self._state = state
        self._runtime = runtime
        self._message = message
        self._dead: asyncio.Queue[Replica] = asyncio.Queue()
        self.restarted: Callable[[Replica], None] = lambda replica: None

    def dead(self, replica: Replica, error: ReplicaError) -> None:
        """Take the replica out and put what it held back in the queue, before anything else can run."""
        if replica.alive:
            self._bury(replica, error)

    def _bury(self, replica: Replica, error: ReplicaError) -> None:
        replica.alive = False
        replica.version = -1
        lost = sorted(replica.in_flight)
        replica.in_flight.clear()
        for rollout_id in lost:
            self._state.ledger.requeue(rollout_id)
            self._state.requeue.append(rollout_id)
        self._message(f"{replica.name} died; its {len(lost)} rollouts are issued again. Cause: {error}")
        self._dead.put_nowait(replica)
        self._state.progressed()

    async def run(self, publisher: WeightPublisher, turns: Turns) -> None:
        """Restart the dead, one after another; out of restarts the run goes on with the replicas that are left."""
        while True:
            replica = await self._dead.get()
            if replica.restarts >= self._state.config.generator.max_restarts:
                if not any(r.alive for r in self._state.replicas) and self._dead.empty():
                    raise ReplicaError(
                        f"no generator is left: {replica.name} died after {replica.restarts} restarts "
                        f"(generator.max_restarts={self._state.config.generator.max_restarts})."
                    )
                self._state.replicas.remove(replica)
                self._message(f"{replica.name} is not started again after {replica.restarts} restarts.")
                self._state.progressed()
                continue
            self._refuse_lost_version(replica, publisher)
            replica.restarts += 1
            try:
                async with turns.start_of(replica):
                    replica.handle = await self._runtime.restart(replica.handle)
            except ReplicaError as error:
                self._bury(replica, error)
                continue
            await publisher.rejoin(replica)
            if not replica.alive:
                continue  # whoever met its new death has queued it again
            self._message(f"{replica.name} is back at version {replica.version}.")
            self.restarted(replica)
            self._state.progressed()

    def _refuse_lost_version(self, replica: Replica, publisher: WeightPublisher) -> None:
        """While a publish waits for the schedule, the version that the schedule still needs lives in replicas alone."""
        others = any(r.alive for r in self._state.replicas)
        if self._state.scheduled and publisher.busy and self._state.requeue and not others:
            raise ReplicaError(
                f"{replica.name}, the last generator, died with rollouts of a version that the learner has passed; "
                f"async.mode={self._state.config.async_.mode} must not replace them by fresher ones. "
                "Resume from a checkpoint."
            )


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
