"""Which replicas live and which are dead. Any loop may report a death; one loop restarts the dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.state import Replica, RunState


class Replicas:
    """The living and the dead of ``state.replicas``."""

    def __init__(self, state: RunState, message: Callable[[str], None]) -> None:
        self._state = state
        self._message = message
        self._dead: asyncio.Queue[Replica] = asyncio.Queue()

    def died(self, replica: Replica, error: ReplicaError) -> None:
        """Report a death, from any loop and any number of times: the first report takes the replica out and puts its
        rollouts back in the queue, before anything else can run."""
        if replica.alive:
            self.bury(replica, error)

    def bury(self, replica: Replica, error: ReplicaError) -> None:
        """As :meth:`died`, also for a replica that died again before it was back."""
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

    async def next_dead(self) -> Replica:
        """Wait for the next replica that is to be started again."""
        return await self._dead.get()

    @property
    def any_left(self) -> bool:
        """Whether a replica lives, or a dead one still waits for its restart."""
        return any(r.alive for r in self._state.replicas) or not self._dead.empty()
