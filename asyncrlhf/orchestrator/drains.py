"""Nodes that Ray drains, such as a spot machine that goes in two minutes: what sits on them leaves in order.

on the node     what happens
--------------  ---------------------------------------------------------------------------------------------------
a generator     it gets no new work. What it has not finished in half of the time left is issued again, and it is
                started on another node, which does not count as a restart
a learner rank  a checkpoint is written after the step under way, so that the rank's death costs no more
the driver      the run ends as after a signal
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from asyncrlhf.cluster.handles import DRIVER, Runtime
from asyncrlhf.errors import ReplicaError
from asyncrlhf.orchestrator.state import Replica, RunState

LOOK_SECONDS = 1.0
MOST_SECONDS = 60.0  # for rollouts under way, where the node has no deadline
SHARE = 0.5  # of the time left, for rollouts under way; the rest is for the restart on another node


@dataclass(eq=False)
class Drains:
    """``save`` asks for a checkpoint after the step under way, ``end`` for the run's end."""

    state: RunState
    runtime: Runtime
    save: Callable[[], None]
    end: Callable[[], str]
    _told: set[tuple[str, str]] = field(default_factory=set)  # parts, and the nodes that they leave
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)

    async def watch(self) -> None:
        """Ask every second, until the run ends."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                found = {} if self.state.stopping else await self.runtime.leaving()
                fresh = {name: at for name, at in found.items() if (name, at[0]) not in self._told}
                self._told |= {(name, node) for name, (node, _) in fresh.items()}
                self._act({name: seconds for name, (_, seconds) in fresh.items()})
        finally:
            for task in self._leaving:
                task.cancel()

    def _act(self, leaving: dict[str, float]) -> None:
        """``leaving``: the seconds that the node of each part has left."""
        for name, seconds in leaving.items():
            replica = next((r for r in self.state.replicas if r.name == name and r.alive), None)
            said = f"Ray drains the node of {name}{'' if seconds > 1e9 else f', which goes in {seconds:.0f} s'}"
            if name == DRIVER:
                self.state.message(f"{said}. {self.end()}")
            elif replica is not None:
                self.state.message(f"{said}: it gets no new work.")
                replica.leaving = True
                self.state.touch(replica)
                task = asyncio.create_task(self._hand_back(replica, seconds), name=f"{name} leaves")
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            elif name.startswith("learner"):
                self.state.message(f"{said}: a checkpoint is written after this step.")
                self.save()
            else:
                self.state.message(f"{said}: it is started again elsewhere when that happens.")

    async def _hand_back(self, replica: Replica, seconds: float) -> None:
        """Let the replica finish what it can; then it counts as dead. The scheduled modes wait for no single replica,
        as groups go round robin."""
        handle, wait = replica.handle, 0.0 if self.state.scheduled else min(SHARE * seconds, MOST_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self.state.emptied.wait_for(lambda: not (replica.alive and replica.in_flight))
        if replica.handle is handle:
            replica.restarts -= replica.alive
            self.state.died(replica, ReplicaError("Ray drains its node"))
        replica.leaving = False
