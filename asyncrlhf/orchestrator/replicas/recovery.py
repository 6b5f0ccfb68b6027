"""The two loops that bring replicas into a run: one restarts dead ones, the other adds some as the cluster grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.replicas.turns import Turns
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.state import Replica, RunState

LOOK_SECONDS = 3.0  # between two checks of the cluster; doubled after each failed start
LONGEST_WAIT = 300.0


@dataclass(eq=False)
class Recovery:
    """``joined`` is called with each replica that holds weights and may be given work."""

    state: RunState
    runtime: Runtime
    publisher: WeightPublisher
    turns: Turns
    joined: Callable[[Replica], None]

    async def restart(self) -> None:
        """Restart dead replicas, one after another; remove a replica that has no restarts left."""
        while True:
            replica = await self.state.dead.get()
            if replica.restarts >= self.state.config.max_restarts:
                await self._leave_out(replica)
                continue
            self._refuse_lost_version(replica)
            replica.restarts += 1
            try:
                async with self.turns.start_of(replica):
                    replica.handle = await self.runtime.restart(replica.handle)
            except ReplicaError as error:
                self.state.bury(replica, error)
                continue
            await self._join(replica, "is back")

    async def grow(self) -> None:
        """Check every few seconds, until the run ends, whether the cluster has room for one more replica."""
        pause = LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                grown = not self.state.stopping and await self._add_replica()
            except ReplicaError as error:
                pause = min(2 * pause, LONGEST_WAIT)
                self.state.message(f"Could not start another replica; the next try is in {pause:g} s. Cause: {error}")
                continue
            pause = 0.0 if grown else LOOK_SECONDS

    async def _add_replica(self) -> bool:
        """Start one replica if there is room; returns True if one was started."""
        handle = await self.runtime.add_generator([r.name for r in self.state.replicas])
        if handle is None:
            return False
        replica = Replica(handle, alive=False)  # no member of a weight group before it rejoins
        self.state.replicas.append(replica)
        await self._join(replica, "joined")
        return True

    async def _join(self, replica: Replica, how: str) -> None:
        """Load the version of the other replicas on a replica that was just started. If it dies meanwhile, the loop
        that saw its death has queued it again."""
        await self.publisher.rejoin(replica)
        if replica.alive:
            self.state.message(f"{replica.name} {how} at version {replica.version}.")
            self.state.journal.note("joined", replica=replica.name, version=replica.version)
            self.joined(replica)
            self.state.progressed()

    async def _leave_out(self, replica: Replica) -> None:
        """Remove the replica and end its process, which may hang: an evaluation would wait for it for ever."""
        if self.state.dead.empty() and not any(r.alive for r in self.state.replicas):
            raise ReplicaError(
                f"no generator is left: {replica.name} died after {replica.restarts} restarts "
                f"(max_restarts={self.state.config.max_restarts}). Cause: {replica.cause}"
            )
        self.state.replicas.remove(replica)
        self.state.message(f"{replica.name} is not started again after {replica.restarts} restarts.")
        await replica.handle.close()
        self.state.progressed()

    def _refuse_lost_version(self, replica: Replica) -> None:
        """Raise if the last replica with a version that the schedule still needs has died."""
        others = any(r.alive for r in self.state.replicas)
        if self.state.scheduled and self.publisher.busy and self.state.requeue and not others:
            raise ReplicaError(
                f"{replica.name}, the last generator, died with rollouts of a version that the learner has passed; "
                f"async.mode={self.state.config.async_.mode} must not replace them by fresher ones. "
                "Resume from a checkpoint."
            )
