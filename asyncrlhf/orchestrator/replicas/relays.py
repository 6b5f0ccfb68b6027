"""``weights.transport=relay``: one replica of each machine gets the weights; its neighbours load what it has staged."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        self._pulled = state.config.async_.on_weight_update == "pull"
        self._lent: dict[object, tuple[str, Ticket]] = {}  # of each load under way: its machine, and what it reads
        self._lost = False  # whether no version has come since the learner's death

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
                    self._lost = False
                    done.add(host)

    def held(self, replica: Replica) -> int | None:
        """The version that the replica's machine holds; None if its holder died or it never had one, and a transfer
        would bring it; -1 if there is none to bring, after the learner's death."""
        if self._lost:
            return -1
        holder = self._holders.get(self._hosts.get(replica.handle, ""))
        return holder.ticket.version if holder is not None and holder.ticket is not None and holder.lives else None

    def forget(self) -> None:
        """The learner is lost: what the machines hold is of no use."""
        self._holders, self._lost = {}, True

    def ticket(self, replica: Replica) -> tuple[Ticket, ...]:
        """Where the replica loads from: a neighbour's memory, or, if empty, what it has staged itself."""
        holder = self._holders.get(self._hosts.get(replica.handle, ""))
        if holder is None or holder.ticket is None or (holder.handle is replica.handle and not self._pulled):
            return ()
        return (holder.ticket,)

    @contextmanager
    def lent(self, replica: Replica) -> Iterator[tuple[Ticket, ...]]:
        """:meth:`ticket`, for a load within this context: until its end a holder that is pulled from leaves that memory
        as it is (:meth:`read`)."""
        tickets, load = self.ticket(replica), object()
        for ticket in tickets:
            self._lent[load] = self._hosts[replica.handle], ticket
        try:
            yield tickets
        finally:
            self._lent.pop(load, None)

    def read(self, replica: Replica) -> tuple[tuple[tuple[Any, ...], ...], ...]:
        """The further argument of ``GeneratorWorker.receive``: with pull, the memories in which loads of this machine
        read or may begin to; else none, since all loads have ended when the next version comes."""
        if not self._pulled:
            return ()
        host = self._hosts[replica.handle]
        present = tuple(ticket.refs for ticket in self.ticket(replica))
        return ((*present, *(ticket.refs for at, ticket in self._lent.values() if at == host)),)

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
