"""Publishing: sends a snapshot to every replica while the learner trains, has the replicas load it, and audits them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.messages import Offer
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import LONG_SECONDS, GeneratorHandle, Runtime
from asyncrlhf.engines.engine import CacheMode
from asyncrlhf.errors import LearnerLostError, ReplicaError, WeightSyncError
from asyncrlhf.orchestrator.replicas.audits import Audits
from asyncrlhf.orchestrator.replicas.direct_load import DirectLoads
from asyncrlhf.orchestrator.replicas.load_times import Pulls, cache_mode, may_load
from asyncrlhf.orchestrator.replicas.relays import Relays
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.transport.protocol import LostReceiversError, Ticket, TransferStats

GRACE_SECONDS = 1.0  # beyond the transport's own time-out, whose sentence says more


class WeightPublisher:
    """Makes one publish at a time; ``busy`` until all live replicas, or with pull their machines, have it."""

    def __init__(
        self, state: RunState, runtime: Runtime, vocab_size: int, hand_over: Callable[[], Awaitable[None]]
    ) -> None:
        """``hand_over`` publishes the other content of a snapshot: the critic, if it is a service."""
        self._state, self._runtime, self._hand_over = state, runtime, hand_over
        self._task: asyncio.Task[None] | None = None
        self._group: list[GeneratorHandle] | None = None  # by handle: a replica that was restarted is another member
        self._publishes = self._rejoining = 0
        self._ready: Awaitable[Offer] | None = None  # the next publish's snapshot, made in the learner's turn
        self.audits = Audits(state, runtime, vocab_size)
        self._lock = asyncio.Lock()
        self._direct, self._relays = DirectLoads(state, runtime), Relays(state)
        self.pulls = Pulls(state, self._relays, self._pull)
        self._seconds = state.config.weights.timeout_seconds
        self._mapped: tuple[Ticket, ...] = ()  # where replicas map the learner's memory: of the newest snapshot
        self._lost: LearnerLostError | None = None  # met by a rejoin
        self._down = False  # from the learner's death until it has weights again
        self.last_seconds = self.snapshot_seconds = 0.0  # the newest publish, and for which it blocked the learner
        self.sent: TransferStats | None = None  # of the newest transfer to replicas that stage
        self.waiting_for = ""

    @property
    def busy(self) -> bool:
        """Whether a publish or a rejoin is under way, so that no new snapshot may replace the present one."""
        return self._publishing or self._rejoining > 0

    @property
    def _publishing(self) -> bool:
        return self._task is not None and not self._task.done()

    def publish(self, version: int) -> None:
        """Send the learner's present weights in the background; their snapshot precedes any step ordered later."""
        assert not self._publishing, "a publish is still under way"
        self.raise_if_failed()
        offer, self._ready = self._ready or self._snapshot(), None
        self._publishes += 1
        self._task = asyncio.create_task(self._publish(version, offer), name=f"publish v{version}")
        self._task.add_done_callback(lambda _: self._state.changed.notify())

    async def prepare(self) -> None:
        """On shared devices: make the next publish's snapshot in the learner's turn, unless a replica is joining."""
        if self._runtime.sharing and not self.busy:
            self._ready = asyncio.ensure_future(self._snapshot())
            await self._ready

    def _snapshot(self) -> Awaitable[Offer]:
        return self._runtime.learner.snapshot(self.audits.due(self._publishes))

    @property
    def failure(self) -> BaseException | None:
        """The error of the last publish or of a pull, or the learner's death if a rejoin met it; None without one."""
        if found := self._lost or self.pulls.failure:
            return found
        ended = self._task is not None and self._task.done() and not self._task.cancelled()
        return self._task.exception() if ended and self._task is not None else None

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def idle(self) -> None:
        """Wait until every live replica has loaded the publish under way; raises its error."""
        await self._state.changed.wait_for(lambda: not self.busy)
        self.raise_if_failed()
        await self.pulls.level()

    async def forget(self) -> None:
        """The learner is lost: cancel the publish under way, forget the weight group. The next publish is a first."""
        self._down, self._publishes, self.waiting_for = True, 0, ""
        await self.close()
        self.pulls.forget()
        self._task = self._group = self._lost = self._ready = None
        self._direct.forget()

    def found(self) -> None:
        """The learner is back: replicas may rejoin."""
        self._down = False
        self._state.changed.notify()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.pulls.close()

    async def _publish(self, version: int, offered: Awaitable[Offer]) -> None:
        started, note = self._state.now(), self._state.journal.note
        handing: asyncio.Future[None] | None = None
        try:
            offer = await offered
            self.snapshot_seconds = offer.seconds
            handing = asyncio.ensure_future(self._hand_over())
            async with self._lock:
                members = [r for r in self._state.replicas if r.alive]
                note("publish", version=version, replicas=[r.name for r in members])
                members = await self._send_staged(members)
                await asyncio.gather(*(self._load_in_turn(r, version) for r in members if not self.pulls.on))
                self._state.published_version = version
                note("published", version=version)
            await self.pulls.level(offer.probe_logprobs is not None)  # an audit needs all at this version
            await self.audits.make(members, version, offer)
            await handing  # before the next snapshot takes this one's place
        finally:
            if handing is not None:
                handing.cancel()
        self.last_seconds = self._state.now() - started
        self._state.progressed()
        await off_loop(partial(self._state.published, version))

    async def _send_staged(self, members: list[Replica]) -> list[Replica]:
        """Transfer the newest snapshot to the members that stage it; returns all members that are alive afterwards."""
        await self._relays.spread([r for r in members if not self._direct.serves(r)], self._send)
        return [r for r in members if r.alive]

    async def _send(self, members: list[Replica]) -> None:
        """Transfer the newest snapshot to all ``members``; again to the others if one dies or hangs and is removed."""
        while members:
            failures = await self._form(members) or await self._transfer(members)
            self.waiting_for = ""
            survivors = [r for r in members if r.alive]
            fatal = [f for f in failures if not isinstance(f, WeightSyncError)]
            if fatal:
                raise fatal[0]
            if failures and survivors == members:
                raise failures[0]
            if survivors == members:
                return
            members[:] = survivors

    async def _form(self, members: list[Replica]) -> list[BaseException]:
        """Form the weight group of ``members`` if it is not the present one; returns the errors of lost receivers."""
        handles = [r.handle for r in members]
        if self._group == handles:
            return []
        self._group = None
        self.waiting_for = f"the weight group of {_names(members)} to form"
        try:
            await self._runtime.connect(handles)
        except LostReceiversError as error:
            self._bury(members, error)
            return [error]
        self._group = handles
        return []

    async def _transfer(self, members: list[Replica]) -> list[BaseException]:
        """Make one attempt and return its errors. Receivers that the sender names as lost are not waited for."""
        ticket = await self._ticket()
        if self._runtime.maps:
            self._mapped = (ticket,)
            return []
        self.waiting_for = f"weights to reach {_names(members)}"
        receiving = {asyncio.create_task(self._receive(r, ticket)): r for r in members}
        failures: list[BaseException] = []
        try:
            self.sent = await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.transfer, ticket)
        except WeightSyncError as error:
            if isinstance(error, LostReceiversError):
                self._bury(members, error)
            failures.append(error)
        except BaseException:
            for task in receiving:
                task.cancel()
            raise
        failures += await self._end_receiving(receiving)
        if failures:
            self._group = None
        return failures

    async def _receive(self, replica: Replica, ticket: Ticket) -> None:
        read = self._relays.read(replica)
        await self._state.heard(replica, replica.handle.call(LONG_SECONDS, GeneratorWorker.receive, ticket, *read))

    async def _ticket(self) -> Ticket:
        """The ticket of the newest snapshot, whose bytes also set the time limit of transfers and loads."""
        ticket = await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.ticket)
        self._seconds = self._state.config.weights.seconds_for(sum(ticket.manifest.bucket_bytes))
        return ticket

    async def _end_receiving(self, receiving: dict[asyncio.Task[None], Replica]) -> list[BaseException]:
        """Wait for the live receivers, at most the transport's time-out plus a grace time; returns their errors."""
        seconds = self._seconds + GRACE_SECONDS
        awaited = [task for task, replica in receiving.items() if replica.alive]
        try:
            late = (await asyncio.wait(awaited, timeout=seconds))[1] if awaited else set()
        finally:
            for task in receiving:
                task.cancel()
        for replica in (receiving[task] for task in late):
            self._state.died(replica, ReplicaError(f"{replica.name} did not take its weights within {seconds:g} s"))
        results = await asyncio.gather(*receiving, return_exceptions=True)
        return [r for r in results if isinstance(r, Exception)]

    def _bury(self, members: list[Replica], error: LostReceiversError) -> None:
        """Report each receiver that ``error`` names as dead, even if its process still runs."""
        for replica in members:
            if (reason := error.receivers.get(replica.name)) is not None:
                self._state.died(replica, ReplicaError(f"{replica.name} {reason} during a weight transfer"))

    async def _load_in_turn(self, replica: Replica, version: int) -> None:
        """Load when ``async.on_weight_update`` allows it."""
        self.waiting_for = f"{replica.name} to finish its rollouts before it loads version {version}"
        await may_load(self._state, replica)
        self.waiting_for = ""
        try:
            await self._load(replica, version, cache_mode(self._state))
        finally:
            replica.draining = False
        self._state.touch(replica)

    async def _load(self, replica: Replica, version: int, cache: CacheMode) -> None:
        """Load what the replica has staged, or its workers receive during the load."""
        if not self._direct.serves(replica):
            return await self._load_received(replica, version, cache)
        self.waiting_for = f"the workers of {replica.name} to take version {version}"
        await self._direct.load(replica, self._ticket, partial(self._load_received, replica, version, cache))
        self.waiting_for = ""

    async def _load_received(self, replica: Replica, version: int, cache: CacheMode) -> None:
        """Ask the replica to load; after that the gate counts the replica at ``version``."""
        if not replica.alive:
            return
        epoch, handle, replica.asked = self._state.epoch, replica.handle, version
        self._state.journal.note("load", replica=replica.name, version=version)
        try:
            with self._relays.lent(replica) as there:
                call = handle.call(self._seconds, GeneratorWorker.load, version, cache, *(self._mapped or there))
                await self._state.heard(replica, call)
        except WeightSyncError as error:
            await self._ticket()  # raises the learner's death, with which the memory to load from is gone
            if not self._relays.bury(replica, error):
                raise
        # Else the learner died meanwhile, and the version with it; or the replica did.
        if epoch == self._state.epoch and replica.alive and replica.handle is handle:
            replica.version = version
            self._state.journal.note("loaded", replica=replica.name, version=version)

    async def _pull(self, replica: Replica) -> None:
        """Load the version that the replica's machine holds; a machine whose holder died gets the newest one first."""
        while replica.alive and self._relays.held(replica) is None:
            async with self._undisturbed():
                await self._send_staged([replica])
        if replica.alive and (version := self.pulls.newest(replica)) >= 0:
            await self._load_received(replica, version, "keep")

    async def rejoin(self, replica: Replica) -> None:
        """Load the others' version on a restarted replica; if the learner dies meanwhile, again when it is back."""
        if self.pulls.on:
            async with self._lock:  # a transfer under way must not take it for the one that died
                replica.alive = True
            return await self.pulls.join(replica)
        while replica.version < 0:
            learner = self._runtime.learner
            try:
                return await self._rejoin(replica)
            except LearnerLostError as error:
                if self._runtime.learner is learner:
                    self._lost = error
                    self._state.changed.notify()
                was_member = replica.alive
                await self._state.changed.wait_for(lambda: self._lost is None and not self._down)
                if was_member and not replica.alive:
                    return  # its death is reported

    async def _rejoin(self, replica: Replica) -> None:
        await self._until_newest_is_published()
        async with self._undisturbed():
            replica.alive = True
            await self._send_staged([replica])
            await self._load(replica, self._state.published_version, "keep")

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncIterator[None]:
        """Within this context no other transfer begins, and no snapshot takes the place of the present one."""
        self._rejoining += 1
        try:
            async with self._lock:
                yield
        finally:
            self._rejoining -= 1
            self._state.progressed()

    async def _until_newest_is_published(self) -> None:
        """A snapshot that is newer goes to all replicas together first: none may get ahead of a schedule."""
        while True:
            await self._state.changed.wait_for(lambda: not self._publishing and not self._down)
            self.raise_if_failed()
            ticket = await self._runtime.learner.call(LONG_SECONDS, LearnerWorker.ticket)
            if ticket.version <= self._state.published_version and not (self._publishing or self._ready):
                return  # else a publish may have begun during the call
            await self._state.changed.wait_for(lambda: self._publishing)


def _names(members: Sequence[Replica]) -> str:
    return ", ".join(r.name for r in members)
