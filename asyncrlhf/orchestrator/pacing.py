"""How much work each replica may hold: a slow one gets what it can finish in time, and is tried again now and then.

A replica is *slow* when its rollouts take over twice as long as the fastest replica's, and as the others need for a
whole batch. It is *late* when they also take longer than the staleness bound leaves them: what it makes would be
dropped, or the learner would wait for it. A late replica's window shrinks in proportion, at least by half, and to a
quarter where nothing came of what it had. At less than one rollout the replica gets probes alone: single rollouts
outside of the ledger. The first one in time opens the window for one group, and every group in time widens it, as
TCP's slow start does.

Slow replicas that are in time hold at most the bound's batches together, so that one whole batch of places is left to
the others: the learner never waits for a slow replica while fast ones could have made its batch.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from asyncrlhf.cluster.handles import GeneratorHandle
from asyncrlhf.orchestrator.pace import Pace
from asyncrlhf.orchestrator.state import Replica, RunState

# Beyond its slots a replica holds this share of them in its queue, so that a freed slot need not wait for a message. A
# small share: what waits behind a slow replica could have begun on a fast one.
QUEUE_SHARE = 0.25
SLOW_FACTOR = 2.0  # medians of a few rollouts differ by less where replicas are alike
STEPS_REMEMBERED = 5  # the median of their intervals is not moved by a checkpoint or an evaluation
# Batches are begun all through a step: on the average a rollout has half a step more than the bound says.
PHASE = 0.5
PROBE_REST = 4.0  # a replica that is held back spends at most a fifth of its time on probes


class Pacing:
    """Judges the replicas whenever the dispatcher looks. In the scheduled modes it only times them, for their
    work is fixed beforehand."""

    def __init__(self, state: RunState, probe: Callable[[Replica], Awaitable[bool]]) -> None:
        self._state = state
        self._probe = probe
        self._known: dict[str, GeneratorHandle] = {}
        self._version = state.version
        self._stepped_at: float | None = None
        self._intervals: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # the next cut of a window, or the next probe

    def close(self) -> None:
        for task in self._probes.values():
            task.cancel()

    def choose(self, replicas: Sequence[Replica], size: int) -> Replica | None:
        """The one with most free slots among those that may take ``size`` more rollouts."""
        able = [r for r in replicas if self._may_take(r, size)]
        return max(able, key=lambda r: r.handle.slots - len(r.in_flight), default=None)

    def _may_take(self, replica: Replica, size: int) -> bool:
        pace, limit = replica.pace, replica.handle.slots * (1 + QUEUE_SHARE)
        if pace.window is not None:
            limit = min(limit, pace.window)
        if pace.held_back or len(replica.in_flight) >= limit:
            return False
        if not pace.slow:
            return True
        held = sum(len(r.in_flight) for r in self._state.replicas if r.pace.slow)
        return held + size <= self._state.bound * self._state.config.batch_size

    def look(self) -> None:
        """Take note of what happened since the last look, and judge every replica anew."""
        now = self._state.now()
        self._note_step(now)
        alive = [r for r in self._state.replicas if r.alive]
        finished = {r.name: self._observe(r, now) for r in alive}
        if self._state.scheduled:
            return
        rates = {r.name: r.handle.slots / r.pace.latency for r in alive if r.pace.latency}
        known = sorted(r.pace.latency for r in alive if r.pace.latency)
        for replica in alive:
            own = replica.pace.latency
            others = known[1:] if known and own == known[0] else known
            rate = sum(rates.values()) - rates.get(replica.name, 0.0)
            batch = self._state.config.batch_size
            self._judge(replica, max(others[0], batch / rate) if others and rate > 0 else None)
            self._set_window(replica, finished[replica.name], now)
            self._probe_if_due(replica, now)

    def _note_step(self, now: float) -> None:
        if self._state.version == self._version:
            return
        if self._stepped_at is not None:
            self._intervals.append((now - self._stepped_at) / (self._state.version - self._version))
        self._version, self._stepped_at = self._state.version, now

    def _observe(self, replica: Replica, now: float) -> int:
        if self._known.get(replica.name) is not replica.handle:  # new, or another process in a dead one's place
            self._known[replica.name] = replica.handle
            replica.pace = Pace(finished=replica.pace.finished)
            for rollout_id in replica.in_flight:
                replica.pace.begin(rollout_id, now, 0)
        return replica.pace.observe(replica.in_flight, lambda i: self._state.ledger.get(i) is not None, now)

    def _allowed(self, pace: Pace) -> float | None:
        """Seconds until what begins now could only be trained over the bound; None before steps have been timed."""
        if not self._intervals:
            return None
        steps = self._state.bound + PHASE - pace.version_lag
        return max(0.0, steps) * statistics.median(self._intervals)

    def _judge(self, replica: Replica, reference: float | None) -> None:
        """``reference``: seconds of the fastest other, and at least what the others need for a batch."""
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
            # What is under way was begun before the cut: the next judgement waits for it, unless nothing comes next.
            self._not_before[replica.name] = 0.0 if pace.held_back else now + allowed
        elif pace.window is not None and finished and not pace.late:
            pace.window += finished
            if pace.window >= replica.handle.slots * (1 + QUEUE_SHARE):
                pace.window = None

    def _probe_if_due(self, replica: Replica, now: float) -> None:
        """Start a probe of an idle replica that is held back; raises what made its last one fail."""
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
        self._state.changed.notify()
