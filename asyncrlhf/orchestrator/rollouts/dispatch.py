"""Admission and dispatch: which prompt starts, when, and on which replica."""

from __future__ import annotations

import asyncio
import hashlib

from asyncrlhf.data.sources import PromptSource
from asyncrlhf.orchestrator.replicas.pacing import Pacing
from asyncrlhf.orchestrator.state import GroupInProgress, Replica, RunState
from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams

FIRST_PROBE_ID = -(2**40)  # far below the ids of evaluations, which count down from -1
Plan = dict[str, tuple[Replica, list[GenerationRequest]]]  # by the replica's name


def request_seed(seed: int, rollout_id: int) -> int:
    """The seed of one rollout's random draws, which depends only on the run's seed and the rollout id."""
    digest = hashlib.blake2b(f"{seed}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Dispatcher:
    """Starts groups when the gate, the buffer and a replica have room, and issues a dead replica's rollouts again."""

    def __init__(self, state: RunState, source: PromptSource, sampling: SamplingParams) -> None:
        self._state = state
        self._source = source
        self._sampling = sampling
        self._pacing = Pacing(state, self._probe)
        self._last_prompt: Prompt | None = None
        self._next_probe_id = FIRST_PROBE_ID

    async def run(self) -> None:
        """Submit all work that fits, each time an event may have made room."""
        room = self._state.room
        try:
            while True:
                seen = room.count
                plan = self._plan()
                await asyncio.gather(*(self._state.heard(r, r.handle.submit(items)) for r, items in plan.values()))
                await room.wait_past(seen)
        finally:
            self._pacing.close()

    def _plan(self) -> Plan:
        """Admit all groups that have room now; returns the work by replica, which the ledger already records."""
        plan: Plan = {}
        self._pacing.look()
        if self._state.stopping and not self._state.scheduled:
            return plan  # a schedule is completed anyway: a resume could not replace the lost version
        self._plan_requeued(plan)
        if self._state.resting:
            return plan
        while (replica := self._choose()) is not None and self._has_room(replica):
            self._admit_group(replica, plan)
        return plan

    def _plan_requeued(self, plan: Plan) -> None:
        """Assign the rollouts of dead replicas before any new group."""
        requeue = self._state.requeue
        for _ in range(len(requeue)):
            rollout_id = requeue.popleft()
            group = self._state.groups[rollout_id // self._state.config.num_generations]
            replica = self._choose_again(group.version)
            if replica is None:
                requeue.append(rollout_id)  # a full rotation restores their order
            else:
                self._assign(replica, rollout_id, group.group_id, group.prompt, plan)

    def _choose_again(self, version: int) -> Replica | None:
        """A replica for a rollout that is issued again: it must hold ``version`` or a newer one, and exactly
        ``version`` in the scheduled modes."""
        if not self._state.scheduled:
            chosen = self._pacing.choose(1)
            if chosen is None or chosen.version >= version:
                return chosen
        able = [r for r in self._state.replicas if r.takes_work]
        if self._state.scheduled:
            return max((r for r in able if r.version == version), key=lambda r: r.free_slots, default=None)
        able = [r for r in able if r.version >= version and self._pacing.may_take(r, 1)]
        return max(able, key=lambda r: r.free_slots, default=None)

    def _has_room(self, replica: Replica) -> bool:
        size = self._state.config.num_generations
        return self._state.gate.room(replica.version) >= size and self._state.buffer.free >= size

    def _choose(self) -> Replica | None:
        """The replica with most free slots among those that can finish in time. In the scheduled modes groups go round
        robin instead, even beyond the free slots: which sequences share an engine's batch must not depend on a
        replica's speed."""
        if not self._state.scheduled:
            return self._pacing.choose(self._state.config.num_generations)
        able = [r for r in self._state.replicas if r.takes_work]
        everyone = len(able) == sum(r.alive for r in self._state.replicas) and len({r.version for r in able}) == 1
        return able[self._state.next_group_id % len(able)] if everyone else None

    def _admit_group(self, replica: Replica, plan: Plan) -> None:
        state, size = self._state, self._state.config.num_generations
        group_id, now = state.next_group_id, state.now()
        state.next_group_id += 1
        ids = list(range(group_id * size, (group_id + 1) * size))
        prompt = self._last_prompt = self._source.next()
        step = state.gate.admit(replica.version)
        state.buffer.reserve(size)
        state.groups[group_id] = GroupInProgress(
            group_id, prompt, now, step, replica.version, set(ids), set(ids), epoch=state.epoch
        )
        for rollout_id in ids:
            state.ledger.admit(rollout_id, group_id, prompt, now)
        for rollout_id in ids:
            self._assign(replica, rollout_id, group_id, prompt, plan)

    def _assign(self, replica: Replica, rollout_id: int, group_id: int, prompt: Prompt, plan: Plan) -> None:
        seed = request_seed(self._state.config.seed, rollout_id)
        request = GenerationRequest(rollout_id, group_id, prompt, seed, self._sampling, self._state.epoch)
        self._state.ledger.start(rollout_id, replica.name, replica.version)
        replica.begin(rollout_id, self._state.now(), self._state.version - replica.version)
        plan.setdefault(replica.name, (replica, []))[1].append(request)

    async def _probe(self, replica: Replica) -> bool:
        """Sample one rollout outside of the ledger, as an evaluation does: no loop waits for it and it never trains."""
        if self._last_prompt is None:
            return False
        seed = request_seed(self._state.config.seed, self._next_probe_id)
        request = GenerationRequest(self._next_probe_id, self._next_probe_id, self._last_prompt, seed, self._sampling)
        self._next_probe_id -= 1
        return bool(await self._state.heard(replica, replica.handle.generate([request])))
