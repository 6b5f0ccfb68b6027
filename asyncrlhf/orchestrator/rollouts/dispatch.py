"""Admission and dispatch: which prompt starts, when, and on which replica."""

from __future__ import annotations

import asyncio
import hashlib

from asyncrlhf.data.sources import PromptSource
from asyncrlhf.orchestrator.replicas.load_times import Pulls
from asyncrlhf.orchestrator.replicas.pacing import Pacing
from asyncrlhf.orchestrator.rollouts.episodes import Episodes
from asyncrlhf.orchestrator.rollouts.work import Plan
from asyncrlhf.orchestrator.state import GroupInProgress, Replica, RunState
from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams

FIRST_PROBE_ID = -(2**40)  # far below the ids of evaluations, which count down from -1


def request_seed(seed: int, rollout_id: int) -> int:
    """The seed of one rollout's random draws, which depends only on the run's seed and the rollout id."""
    digest = hashlib.blake2b(f"{seed}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Dispatcher:
    """Starts groups when the gate, the buffer and a replica have room, and issues a dead replica's rollouts again.
    With ``episodes`` a rollout begins there, and its turns come back to be sampled."""

    def __init__(
        self, state: RunState, source: PromptSource, sampling: SamplingParams, pulls: Pulls,
        episodes: Episodes | None = None,
    ) -> None:  # fmt: skip
        self._state, self._source, self._sampling = state, source, sampling
        self._pulls, self._episodes = pulls, episodes
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
                if self._episodes is not None:
                    self._episodes.begin(plan.episodes)
                await asyncio.gather(*(self._state.heard(w.replica, w.submit()) for w in plan.work.values()))
                await room.wait_past(seen)
        finally:
            self._pacing.close()

    def _plan(self) -> Plan:
        """Admit all groups that have room now; returns the work by replica, which the ledger already records."""
        plan = Plan()
        self._state.forget_late()
        self._pulls.look()
        self._pacing.look()
        if self._state.stopping and not self._state.scheduled:
            return plan  # a schedule is completed anyway: a resume could not replace the lost version
        self._plan_requeued(plan)
        if self._state.resting:
            return plan
        while (replica := self._choose(plan)) is not None and self._has_room(replica.version, plan):
            self._admit_group(replica, plan)
        return plan

    def _plan_requeued(self, plan: Plan) -> None:
        """Assign the rollouts of dead replicas before any new group."""
        requeue, table = self._state.requeue, self._state.episodes
        # In the scheduled modes turns are sampled in rounds: which sequences share an engine's batch, on which the last
        # bits of its log-probs depend, must not depend on a tool's speed.
        in_rounds = self._state.scheduled and self._episodes is not None
        waits = in_rounds and not (table.round_is_whole and not any(r.in_flight for r in self._state.replicas))
        waiting = sorted(requeue) if in_rounds else list(requeue)
        requeue.clear()
        for rollout_id in waiting:
            group = self._state.groups[rollout_id // self._state.config.num_generations]
            if self._episodes is not None and rollout_id not in table.wanted:
                plan.episodes.append(self._request(rollout_id, group.group_id, group.prompt))
                continue
            if waits:
                requeue.append(rollout_id)
                continue
            replica = self._choose_again(group, rollout_id)
            if replica is None:
                requeue.append(rollout_id)
            else:
                self._assign(replica, rollout_id, group.group_id, group.prompt, plan)

    def _choose_again(self, group: GroupInProgress, rollout_id: int) -> Replica | None:
        """A replica for a rollout that is issued again: it must hold the group's version or a newer one, and exactly
        that in the scheduled modes. The one that sampled an episode's turn before, which may have it in its cache, if
        it is free."""
        version = group.version
        if not self._state.scheduled:
            same = next((r for r in self._state.replicas if r.name == self._state.episodes.last.get(rollout_id)), None)
            if same is not None and same.takes_work and same.version >= version and same.has_slot(rollout_id):
                return same
            chosen = self._pulls.chosen(lambda: self._pacing.choose(1), lambda held: held >= version)
            if chosen is None or chosen.version >= version:
                return chosen
        able = [r for r in self._state.replicas if r.takes_work]
        if self._state.scheduled:
            able = [r for r in able if r.version == version]
            if self._episodes is not None:
                return able[group.group_id % len(able)] if able else None
            return max(able, key=lambda r: r.free_slots, default=None)
        able = [r for r in able if r.version >= version and self._pacing.may_take(r, 1)]
        return max(able, key=lambda r: r.free_slots, default=None)

    def _has_room(self, version: int, plan: Plan) -> bool:
        """Whether a group may begin on a replica that holds ``version``."""
        state, size = self._state, self._state.config.num_generations
        most = state.config.episode.concurrency
        if most and len(state.episodes.at) + len(plan.episodes) + size > max(most, size):
            return False
        return state.gate.room(version) >= size and state.buffer.free >= size

    def _choose(self, plan: Plan) -> Replica | None:
        """The replica with most free slots among those that can finish in time. In the scheduled modes groups go round
        robin instead, even beyond the free slots: which sequences share an engine's batch must not depend on a
        replica's speed."""
        if not self._state.scheduled:
            size = self._state.config.num_generations
            return self._pulls.chosen(lambda: self._pacing.choose(size), lambda held: self._has_room(held, plan))
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
        if self._episodes is not None:
            plan.episodes += [self._request(rollout_id, group_id, prompt) for rollout_id in ids]
            for rollout_id in ids:  # the replica keeps a slot for the first turn
                replica.expected[rollout_id] = now
                state.episodes.last[rollout_id] = replica.name
            return
        for rollout_id in ids:
            self._assign(replica, rollout_id, group_id, prompt, plan)

    def _request(self, rollout_id: int, group_id: int, prompt: Prompt) -> GenerationRequest:
        seed = request_seed(self._state.config.seed, rollout_id)
        return GenerationRequest(rollout_id, group_id, prompt, seed, self._sampling, self._state.epoch)

    def _assign(self, replica: Replica, rollout_id: int, group_id: int, prompt: Prompt, plan: Plan) -> None:
        """Give the replica the rollout, or the turn of it that its episode waits for."""
        state, turn = self._state, self._state.episodes.wanted.get(rollout_id)
        if turn is None:
            plan.of(replica).items.append(self._request(rollout_id, group_id, prompt))
            state.ledger.start(rollout_id, replica.name, replica.version)
        else:  # its episode has begun
            plan.of(replica).turns.append(turn.payload)
            state.expect_no_more(rollout_id)
        replica.begin(rollout_id, state.now(), state.version - replica.version)

    async def _probe(self, replica: Replica) -> bool:
        """Sample one rollout outside of the ledger, as an evaluation does: no loop waits for it and it never trains."""
        if self._last_prompt is None:
            return False
        request = self._request(self._next_probe_id, self._next_probe_id, self._last_prompt)
        self._next_probe_id -= 1
        return bool(await self._state.heard(replica, replica.handle.generate([request])))
