"""What the dispatcher gives out at one time."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrlhf.orchestrator.state import Replica
from asyncrlhf.types import GenerationRequest, Payload


@dataclass
class Work:
    """What one replica is given: rollouts, and turns of episodes."""

    replica: Replica
    items: list[GenerationRequest] = field(default_factory=list)
    turns: list[Payload] = field(default_factory=list)

    async def submit(self) -> None:
        if self.items:
            await self.replica.handle.submit(self.items)
        if self.turns:
            await self.replica.handle.submit_turns(self.turns)


@dataclass
class Plan:
    """The work by the replica's name, and episodes that begin."""

    work: dict[str, Work] = field(default_factory=dict)
    episodes: list[GenerationRequest] = field(default_factory=list)

    def of(self, replica: Replica) -> Work:
        return self.work.setdefault(replica.name, Work(replica))
