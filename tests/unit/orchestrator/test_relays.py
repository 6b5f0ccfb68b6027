"""``weights.transport=relay``: who gets weights for a machine, where others load from, and what a death costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.replicas.relays import Relays
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.types import WeightManifest


class Handle:
    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.version = -1  # that it has staged
        self.dies_in = ""  # the call in which it does

    async def call(self, seconds: float, method: Callable[..., Any]) -> Any:
        if method.__name__ == self.dies_in:
            raise ReplicaError(f"{self.name} died")
        if method.__name__ == "host":
            return self.host
        assert method.__name__ == "offer"
        return Ticket(self.version, 0, WeightManifest((), ()), (self.name,))


class World:
    """Six replicas on three machines."""

    def __init__(self) -> None:
        self.state: RunState = build_state(load_config(["runtime=ray", "weights.transport=relay"]))
        self.state.message = lambda text: None
        self.replicas = [Replica(Handle(f"g{i}", f"machine {i % 3}")) for i in range(6)]  # type: ignore[arg-type]
        self.state.replicas.extend(self.replicas)
        self.relays = Relays(self.state)
        self.sent: list[list[str]] = []
        self.dies_in_transfer: set[str] = set()

    async def publish(self, version: int, members: list[Replica] | None = None) -> list[list[str]]:
        """The replicas of each transfer."""
        self.sent = []

        async def send(given: list[Replica]) -> None:
            self.sent.append([r.name for r in given])
            for replica in list(given):
                if replica.name in self.dies_in_transfer:
                    self.state.died(replica, ReplicaError("killed"))
                    given.remove(replica)
                else:
                    replica.handle.version = version  # type: ignore[attr-defined]

        await self.relays.spread(members or [r for r in self.replicas if r.alive], send)
        return self.sent

    def sources(self) -> list[str]:
        """Where each living replica loads from, and which version; an empty text: what it has staged itself."""
        living = [r for r in self.replicas if r.alive]
        tickets = [self.relays.ticket(r) for r in living]
        return [f"{ticket[0].refs[0]} v{ticket[0].version}" if ticket else "" for ticket in tickets]


async def test_one_replica_of_each_machine_gets_the_version() -> None:
    world = World()
    for version in (1, 2):
        assert await world.publish(version) == [["g0", "g1", "g2"]]
        assert world.sources() == ["", "", "", f"g0 v{version}", f"g1 v{version}", f"g2 v{version}"]


async def test_a_neighbour_takes_the_place_of_one_that_dies_in_the_transfer() -> None:
    world = World()
    world.dies_in_transfer = {"g1"}
    assert await world.publish(1) == [["g0", "g1", "g2"], ["g4"]]
    assert world.sources() == ["", "", "g0 v1", "", "g2 v1"]
    assert await world.publish(2) == [["g0", "g2", "g4"]]
    world.dies_in_transfer = {"g4"}
    assert await world.publish(3) == [["g0", "g2", "g4"]]
    assert world.sources() == ["", "", "g0 v3", "g2 v3"]


async def test_one_that_dies_before_it_tells_what_it_holds_is_replaced_too() -> None:
    world = World()
    world.replicas[0].handle.dies_in = "offer"  # type: ignore[attr-defined]
    world.replicas[4].handle.dies_in = "host"  # type: ignore[attr-defined]
    assert await world.publish(1) == [["g0", "g1", "g2"], ["g3"]]
    assert [r.alive for r in world.replicas] == [False, True, True, True, False, True]
    assert world.sources() == ["", "", "", "g2 v1"]


async def test_who_joins_late_loads_what_its_machine_holds() -> None:
    world = World()
    await world.publish(1)
    world.replicas[3].handle = Handle("g3", "machine 0")  # type: ignore[assignment]
    assert await world.publish(1, [world.replicas[3]]) == []
    assert world.sources()[3] == "g0 v1"
    world.replicas[5].handle = Handle("g5", "a new machine")  # type: ignore[assignment]
    assert await world.publish(1, [world.replicas[5]]) == [["g5"]]
    assert world.sources()[5] == ""


async def test_a_holder_that_was_restarted_holds_nothing() -> None:
    world = World()
    await world.publish(1)
    world.replicas[0].handle = Handle("g0", "machine 0")  # type: ignore[assignment]
    assert await world.publish(1, [world.replicas[0]]) == [["g0"]]
    assert world.sources()[0] == "" and world.sources()[3] == "g0 v1"


async def test_who_lost_its_holder_before_it_loaded_is_reported_as_dead_and_nobody_else_is() -> None:
    world = World()
    await world.publish(1)
    error = WeightSyncError("it cannot be mapped")
    assert not world.relays.bury(world.replicas[3], error), "its holder lives: the error has another cause"
    world.state.died(world.replicas[0], ReplicaError("killed"))
    assert not world.relays.bury(world.replicas[1], error)
    assert world.relays.bury(world.replicas[3], error) and not world.replicas[3].alive
