"""When a replica loads a version (``async.on_weight_update``): as soon as it comes, once its rollouts have ended, or,
with ``pull``, when that suits its work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.engines.engine import CacheMode
from asyncrlhf.orchestrator.replicas.relays import Relays
from asyncrlhf.orchestrator.state import Replica, RunState


def cache_mode(state: RunState) -> CacheMode:
    """What a load makes of the cache of rollouts in flight."""
    interrupts = not state.scheduled and state.config.async_.on_weight_update == "interrupt"
    return "recompute" if interrupts else "keep"


async def may_load(state: RunState, replica: Replica) -> None:
    """If the mode drains (``drain``, and all scheduled modes), wait until the replica has nothing in flight."""
    if not (state.scheduled or state.config.async_.on_weight_update == "drain"):
        return

    def drained() -> bool:
        # A scheduled batch must be generated whole by its version: wait for its admission as well as for its end.
        return _schedule_done(state) if state.scheduled else not replica.in_flight

    replica.draining = not state.scheduled
    await state.emptied.wait_for(lambda: not replica.alive or drained())


def _schedule_done(state: RunState) -> bool:
    held = min((r.version for r in state.replicas if r.alive), default=-1)
    nothing_due = held < 0 or state.gate.room(held) < state.config.num_generations
    under_way = state.requeue or state.episodes.at or any(r.in_flight for r in state.replicas)
    return nothing_due and not under_way


class Pulls:
    """``async.on_weight_update=pull``.

    A replica is *behind* if its machine holds a newer version than it has loaded. It loads that version before it
    begins a response, new or from its queue, or when it has nothing to do, and gets no work meanwhile; its rollouts in
    flight continue afterwards, with their cache. No other replica and no publish waits for it.

    A replica that needed s seconds to load works for s seconds before it loads again, unless the work at hand needs a
    newer version than it has: a slow one does not spend its time on loads alone.
    """

    def __init__(self, state: RunState, relays: Relays, load: Callable[[Replica], Awaitable[None]]) -> None:
        """``load`` has a replica load the newest version of its machine; it returns also when the replica died."""
        self._state, self._relays, self._load = state, relays, load
        self.on = state.config.async_.on_weight_update == "pull"
        self._tasks: dict[str, tuple[GeneratorHandle, asyncio.Task[None]]] = {}  # by replica
        self._rests_until: dict[str, float] = {}
        self._looked_at = -1  # the published version when all replicas were looked at
        self.failure: BaseException | None = None  # of the first pull that failed for another reason than a death

    def newest(self, replica: Replica) -> int:
        """The version that the replica would load now; a machine whose holder died gets the published one again."""
        held = self._relays.held(replica)
        return self._state.published_version if held is None else held

    def chosen(self, choose: Callable[[], Replica | None], fits: Callable[[int], bool]) -> Replica | None:
        """The replica that ``choose`` names for work for which a version must be such that it ``fits``. One that is
        behind begins to load, and ``choose``, which then passes it over, is asked again."""
        while (replica := choose()) is not None and self._behind(replica):
            if self._rests(replica) and fits(replica.version):
                break
            if not fits(self.newest(replica)):
                break
            self.begin(replica)
        return replica

    def look(self) -> None:
        """Let replicas load that have nothing to do, or a queue from which they would begin responses with old weights.
        After a publish all are looked at, else those that changed."""
        if not self.on:
            return
        published, self._looked_at = self._looked_at != self._state.published_version, self._state.published_version
        for replica in list(self._state.replicas if published else self._state.touched.values()):
            suits = not (replica.in_flight or replica.expected) or replica.free_slots < 0
            if suits and replica.takes_work and self._behind(replica) and not self._rests(replica):
                self.begin(replica)

    def begin(self, replica: Replica) -> asyncio.Task[None]:
        """The load of the replica that is under way, or a new one."""
        handle, task = self._tasks.get(replica.name, (None, None))
        if task is None or task.done() or handle is not replica.handle:
            replica.draining = True  # from now on, so that it is not chosen again
            task = asyncio.create_task(self._run(replica, replica.handle), name=f"pull {replica.name}")
            task.add_done_callback(self._ended)
            self._tasks[replica.name] = replica.handle, task
        return task

    async def level(self, needed: bool = True) -> None:
        """If ``needed``, let all live replicas load what their machines hold, and wait until they have. Raises the
        error of a pull that failed."""
        while self.on and needed and self.failure is None:
            late = [self.begin(r) for r in self._state.replicas if r.alive and self.newest(r) > r.version]
            if not late:
                return
            await asyncio.wait(late)
        if self.failure is not None:
            raise self.failure

    async def join(self, replica: Replica) -> None:
        """Let a replica that was just started load the newest version; returns when it holds one or has died."""
        while replica.alive and replica.version < 0:
            await self._state.changed.wait_for(lambda: self.newest(replica) >= 0 and self.failure is None)
            await asyncio.wait([self.begin(replica)])

    def forget(self) -> None:
        """The learner is lost, and what the machines hold is of no use. All pulls are cancelled before."""
        self._relays.forget()
        self._tasks, self._rests_until, self.failure = {}, {}, None

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _behind(self, replica: Replica) -> bool:
        return self.on and self.newest(replica) > replica.version

    def _rests(self, replica: Replica) -> bool:
        return self._state.now() < self._rests_until.get(replica.name, 0.0)

    async def _run(self, replica: Replica, handle: GeneratorHandle) -> None:
        started = self._state.now()
        try:
            await self._load(replica)
        finally:
            if replica.handle is handle:  # else another process has taken its place meanwhile, and may be loading
                replica.draining = False
        self._rests_until[replica.name] = 2 * self._state.now() - started
        self._state.touch(replica)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failure = self.failure or error
            self._state.changed.notify()
