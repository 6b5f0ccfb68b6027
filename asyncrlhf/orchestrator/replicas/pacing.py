"""How much work each replica may hold: a slow one gets what it can finish in time and is probed from time to time.

A replica is *slow* when its rollouts take over twice as long as the fastest other replica's, and over twice as long as
the others need for a whole batch. It is *late* when they also take longer than the staleness bound allows: its rollouts
would be dropped, or the learner would wait for them. A late replica's window shrinks in proportion, at least by half,
and to a quarter if most of its rollouts were cancelled. With a window under one rollout the replica gets only probes:
single rollouts outside of the ledger. The first probe in time opens the window for one group, and every group in time
widens it, as TCP's slow start does.

Slow replicas that are in time hold at most the bound's batches together, so that the places of one whole batch are left
to the others: the learner never waits for a slow replica while fast ones could have made its batch.
"""

from __future__ import annotations

import asyncio
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable

from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.orchestrator.pace import Pace
from asyncrlhf.orchestrator.replicas.free_slots import FreeSlots
from asyncrlhf.orchestrator.state import Replica, RunState

# Beyond its slots a replica holds this share of them in its queue, so that a freed slot need not wait for a message. A
# small share: what waits behind a slow replica could have begun on a fast one.
QUEUE_SHARE = 0.25
SLOW_FACTOR = 2.0  # medians of a few rollouts differ by less where replicas are alike
STEPS_REMEMBERED = 5  # the median of their intervals is not moved by a checkpoint or an evaluation
# Batches are begun all through a step: on the average a rollout has half a step more than the bound says.
PHASE = 0.5
PROBE_REST = 4.0  # a replica that is held back spends at most a fifth of its time on probes


class Rates:
    """Latencies and rollouts per second of all measured replicas, so that a replica is compared with the others in
    O(log n)."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}  # by name: (latency, rollouts per second)
        self._latencies: list[float] = []  # sorted
        self._rate = 0.0

    def note(self, replica: Replica) -> None:
        """Store the replica's latency as its ``pace`` has it now."""
        before = self._of.pop(replica.name, None)
        if before is not None:
            del self._latencies[bisect_left(self._latencies, before[0])]
            self._rate -= before[1]
        latency = replica.pace.latency
        if latency:
            self._of[replica.name] = (latency, replica.handle.slots / latency)
            insort(self._latencies, latency)
            self._rate += self._of[replica.name][1]

    def reference(self, replica: Replica, batch_size: int) -> float | None:
        """Seconds of a rollout on the fastest other replica, or what the others need for a batch if that is longer.
        None if no other replica has been measured."""
        own = self._of.get(replica.name)
        fastest = 1 if own is not None and own[0] == self._latencies[0] else 0
        rate = self._rate - (own[1] if own is not None else 0.0)
        if len(self._latencies) <= fastest or rate <= 0:
            return None
        return max(self._latencies[fastest], batch_size / rate)


class Pacing:
    """Judges the replicas whose work changed since the dispatcher's last look, and all of them from time to time. In
    the scheduled modes, where work is fixed, it only measures them."""

    def __init__(self, state: RunState, probe: Callable[[Replica], Awaitable[bool]]) -> None:
        self._state = state
        self._probe = probe
        self._begin()

    def _begin(self) -> None:
        """Start without any measurement of the replicas."""
        state = self._state
        self._rates = Rates()
        self._slots = FreeSlots(self._able)
        self._looked_at = -1  # state.changed's count when all replicas were looked at
        self._touches = 0  # of single replicas since then
        self._slow: dict[str, Replica] = {}
        self._known: dict[str, GeneratorHandle] = {}
        self._rests = state.rests
        self._version = state.version
        self._stepped_at: float | None = None
        self._intervals: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._interval: float | None = None  # their median, in seconds
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # the next cut of a window, or the next probe

    def close(self) -> None:
        for task in self._probes.values():
            task.cancel()

    def choose(self, size: int) -> Replica | None:
        """The replica with most free slots among those that may take ``size`` more rollouts."""
        best = self._slots.most(slow=False)
        slow = self._slots.most(slow=True)
        if slow is not None and (best is None or slow[:2] < best[:2]) and self._slow_may_take(size):
            best = slow
        return best[-1] if best is not None else None

    def _able(self, replica: Replica) -> bool:
        """Whether the replica may be given work, apart from quotas shared with others."""
        pace, limit = replica.pace, replica.handle.slots * (1 + QUEUE_SHARE)
        if pace.window is not None:
            limit = min(limit, pace.window)
        return replica.takes_work and not pace.held_back and replica.handle.slots - replica.free_slots < limit

    def may_take(self, replica: Replica, size: int) -> bool:
        """Whether this replica may be given ``size`` rollouts."""
        return self._able(replica) and (not replica.pace.slow or self._slow_may_take(size))

    def _slow_may_take(self, size: int) -> bool:
        held = sum(len(r.in_flight) for r in self._slow.values())
        return held + size <= self._state.bound * self._state.config.batch_size

    def look(self) -> None:
        """Judge the replicas that changed since the last look. All are judged after rare events, such as a step or a
        death, and after as many single changes as there are replicas."""
        state, now = self._state, self._state.now()
        if state.rests != self._rests:
            self.close()
            self._begin()
        touched, state.touched = state.touched, {}
        self._touches += len(touched)
        everyone = state.changed.count != self._looked_at or self._touches >= len(state.replicas)
        if everyone:
            self._note_step(now)
            self._looked_at, self._touches, self._rates, self._slow = state.changed.count, 0, Rates(), {}
            touched = {r.name: r for r in state.replicas}
            self._slots.clear()
        alive = [r for r in touched.values() if r.alive]
        finished = [self._observe(r, now) for r in alive]
        if state.scheduled:
            return
        for replica in alive:
            self._rates.note(replica)
        for replica, ended in zip(alive, finished, strict=True):
            self._judge(replica, self._rates.reference(replica, state.config.batch_size))
            self._set_window(replica, ended, now)
            self._probe_if_due(replica, now)
            self._open_ahead(replica)
            if replica.pace.slow:
                self._slow[replica.name] = replica
            else:
                self._slow.pop(replica.name, None)
            self._slots.offer(replica)

    def _note_step(self, now: float) -> None:
        if self._state.version == self._version:
            return
        if self._stepped_at is not None:
            self._intervals.append((now - self._stepped_at) / (self._state.version - self._version))
            self._interval = statistics.median(self._intervals)
        self._version, self._stepped_at = self._state.version, now

    def _observe(self, replica: Replica, now: float) -> int:
        if self._known.get(replica.name) is not replica.handle:  # new, or another process in a dead one's place
            self._known[replica.name] = replica.handle
            replica.pace = Pace(finished=replica.pace.finished)
            for rollout_id in replica.in_flight:
                replica.pace.begin(rollout_id, now, 0)
        return replica.pace.estimate(now)

    def _allowed(self, pace: Pace) -> float | None:
        """Seconds in which a rollout that begins now must end to train within the bound; None until steps are timed."""
        if self._interval is None:
            return None
        return max(0.0, self._state.bound + PHASE - pace.version_lag) * self._interval

    def _judge(self, replica: Replica, reference: float | None) -> None:
        """Decide whether the replica is slow and late. ``reference``: seconds, as in :meth:`Rates.reference`."""
        pace, allowed = replica.pace, self._allowed(replica.pace)
        pace.slow = reference is not None and pace.latency is not None and pace.latency > SLOW_FACTOR * reference
        too_long = allowed is not None and pace.latency is not None and (pace.latency > allowed or pace.cut_off)
        pace.late = pace.slow and too_long

    def _set_window(self, replica: Replica, finished: int, now: float) -> None:
        pace = replica.pace
        if pace.held_back:
            return
        if pace.late and replica.in_flight and now >= self._not_before.get(replica.name, 0.0):
            allowed = self._allowed(pace) or 0.0
            held = float(len(replica.in_flight))
            size = held if pace.window is None else min(held, pace.window)
            least_cut = 0.25 if pace.cut_off else 0.5
            pace.window = size * min(least_cut, allowed / (pace.latency or 1.0))
            # Rollouts in flight started before the cut: the next judgement waits for them, unless nothing follows.
            self._not_before[replica.name] = 0.0 if pace.held_back else now + allowed
        elif pace.window is not None and finished and not pace.late:
            pace.window += finished
            if pace.window >= replica.handle.slots * (1 + QUEUE_SHARE):
                pace.window = None

    def _open_ahead(self, replica: Replica) -> None:
        """Let so many episodes begin beside those that it has slots for as it samples in the time that one needs for
        its first turn."""
        opening, latency, slots = self._state.episodes.opening, replica.pace.latency, replica.handle.slots
        replica.ahead = int(slots * min(1.0, opening / latency)) if opening and latency else 0

    def _probe_if_due(self, replica: Replica, now: float) -> None:
        """Start a probe on a replica that is held back and idle; raises the error of its last probe."""
        task = self._probes.get(replica.name)
        if task is not None and task.done():
            del self._probes[replica.name]
            task.result()
            task = None
        due = replica.pace.held_back and now >= self._not_before.get(replica.name, 0.0)
        if due and task is None and replica.takes_work and not replica.in_flight:
            self._probes[replica.name] = asyncio.create_task(self._run_probe(replica), name=f"probe {replica.name}")

    async def _run_probe(self, replica: Replica) -> None:
        started, handle = self._state.now(), replica.handle
        answered = await self._probe(replica)
        now = self._state.now()
        self._not_before[replica.name] = now + PROBE_REST * (now - started)
        if not answered or replica.handle is not handle or not replica.alive:
            return
        replica.pace.probed(now - started)
        allowed = self._allowed(replica.pace)
        if allowed is None or now - started <= allowed:
            replica.pace.window = 1.0
        self._state.touch(replica)
