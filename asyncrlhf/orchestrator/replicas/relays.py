"""``weights.transport=relay``: one replica of each machine gets the weights; its neighbours load what it has staged."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, GeneratorHandle
from asyncrlhf.errors import ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.protocol import Ticket


@dataclass(frozen=True)
class _Holder:
    """The replica that staged weights for its machine, by its handle: a replica that was restarted is another one."""

    replica: Replica
    handle: GeneratorHandle
    ticket: Ticket | None  # of what it staged; None: nothing yet

    @property
    def lives(self) -> bool:
        return self.replica.alive and self.replica.handle is self.handle


class Relays:
    """A machine keeps its holder while it lives, so that the weight group stays the same. When it dies, a neighbour
    takes its place with the next version; who joins late loads what the machine has, without a transfer."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._hosts = weakref.WeakKeyDictionary[GeneratorHandle, str]()  # who is restarted has another handle
        self._holders: dict[str, _Holder] = {}  # by machine

    async def spread(self, members: list[Replica], send: Callable[[list[Replica]], Awaitable[None]]) -> None:
        """Bring the newest version to the machine of every live member. ``send`` transfers it to replicas, and removes
        those that die meanwhile from its list; then another one of the machine takes the place. Without a relay all
        members are sent to."""
        if not self._state.config.weights.relay:
            return await send(members)
        done: set[str] = set()
        while True:
            await self._look_up([r for r in members if r.alive])
            machines: dict[str, list[Replica]] = {}
            for replica in members:
                if replica.alive and replica.handle in self._hosts:
                    machines.setdefault(self._hosts[replica.handle], []).append(replica)
            chosen = [self._choose(host, some) for host, some in machines.items() if host not in done]
            due = [replica for replica in chosen if replica is not None]
            if not due:
                return
            await send(due)
            offers = await asyncio.gather(*(self._offered(replica) for replica in due))
            for replica, ticket in zip(due, offers, strict=True):
                if ticket is not None:
                    host = self._hosts[replica.handle]
                    self._holders[host] = _Holder(replica, replica.handle, ticket)
                    done.add(host)

    def ticket(self, replica: Replica) -> tuple[Ticket, ...]:
        """Where the replica loads from: a neighbour's memory, or, if empty, what it has staged itself."""
        holder = self._holders.get(self._hosts.get(replica.handle, ""))
        if holder is None or holder.ticket is None or holder.handle is replica.handle:
            return ()
        return (holder.ticket,)

    def bury(self, replica: Replica, error: WeightSyncError) -> bool:
        """Whether the replica could not load because its holder ended before: it is then reported as dead, since it has
        no whole version, and is restarted."""
        holder = self._holders.get(self._hosts.get(replica.handle, ""))
        if holder is None or holder.handle is replica.handle or holder.lives:
            return False
        self._state.died(replica, ReplicaError(f"{replica.name} lost the weights of {holder.replica.name}: {error}"))
        return True

    def _choose(self, host: str, members: list[Replica]) -> Replica | None:
        """The member that gets the version for the machine; None if a holder beside them has what they ask for: they
        join late, and it is not among them."""
        holder = self._holders.get(host)
        if holder is None or not holder.lives:
            return members[0]
        return holder.replica if holder.replica in members else None

    async def _look_up(self, members: list[Replica]) -> None:
        new = [replica for replica in members if replica.handle not in self._hosts]
        calls = (replica.handle.call(LONG_SECONDS, GeneratorWorker.host) for replica in new)
        for replica, found in zip(new, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(found, ReplicaError):
                self._state.died(replica, found)
            elif isinstance(found, BaseException):
                raise found
            else:
                self._hosts[replica.handle] = found

    async def _offered(self, replica: Replica) -> Ticket | None:
        """What a replica that was sent the version has staged; None if it died."""
        if not replica.alive:
            return None
        try:
            return await replica.handle.call(LONG_SECONDS, GeneratorWorker.offer)
        except ReplicaError as error:
            self._state.died(replica, error)
            return None
