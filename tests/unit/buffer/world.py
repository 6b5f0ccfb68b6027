"""A small controller for tests: drives gate, buffer and ledger, and keeps its own books to compare with."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from asyncrlhf.buffer.admission import LagGate, StalenessGate, build_gate
from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.checks import validate_flow
from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.buffer.replay import ReplayBuffer
from asyncrlhf.records.read.replay import Findings, Replay
from asyncrlhf.records.write.journal import Journal
from asyncrlhf.types import Payload, Prompt, RolloutGroup, RolloutInfo


def make_rollout(
    rollout_id: int, group_id: int, low: int = 0, high: int | None = None, reward: float = 0.0, finished_at: int = 0
) -> RolloutInfo:
    return RolloutInfo(
        rollout_id=rollout_id,
        group_id=group_id,
        generator_id="g0",
        prompt_length=3,
        response_length=5,
        min_version=low,
        max_version=low if high is None else high,
        finish_reason="stop",
        generated_at=1.5,
        payload=Payload(ref=f"payload-{rollout_id}", index=rollout_id),
        admitted_at=0.5,
        finished_at_version=finished_at,
        reward=reward,
        reward_parts={"rule": reward},
        scored_at=2.5,
    )


def make_group(
    group_id: int, low: int = 0, high: int | None = None, rewards: tuple[float, ...] = (0.0, 1.0)
) -> RolloutGroup:
    first = group_id * len(rewards)
    return RolloutGroup(group_id, tuple(make_rollout(first + i, group_id, low, high, r) for i, r in enumerate(rewards)))


def make_prompt(number: int) -> Prompt:
    return Prompt(f"p{number}", f"{number}+1=", np.arange(number % 4 + 1), str(number + 1), {"number": number})


@dataclass(frozen=True)
class Setting:
    mode: str = "async"
    eta: int = 2
    over_stale: str = "drop"
    sampling: str = "fifo"
    max_reuse: int = 1
    publish_every: int = 1
    groups: int = 2  # a step
    siblings: int = 2
    capacity: int = 0
    filter_zero_spread: bool = False
    steps: int | None = None
    replicas: int = 2
    replay_fraction: float = 0.0
    max_age: int = 0
    warmup_steps: int = 0
    adaptive: bool = False
    min_staleness: int = 0

    @property
    def batch_size(self) -> int:
        return self.groups * self.siblings

    def async_config(self) -> AsyncConfig:
        return AsyncConfig(
            mode=self.mode,
            max_staleness=self.eta if self.mode == "async" else None,
            lag=self.eta if self.mode == "fixed_lag" else None,
            over_stale=self.over_stale,
            adaptive=self.adaptive,
            min_staleness=self.min_staleness,
        )

    def buffer_config(self) -> BufferConfig:
        return BufferConfig(
            self.capacity,
            self.sampling,
            self.max_reuse,
            self.filter_zero_spread,
            self.replay_fraction,
            self.max_age,
            self.warmup_steps,
        )


@dataclass
class OpenGroup:
    """A group that is not finished. ``began`` holds the version at which each sibling began, by id."""

    floor: int  # the version of the replica for which the gate admitted it
    step: int | None
    waiting: set[int]
    began: dict[int, int] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)  # id -> replica
    finished: dict[int, RolloutInfo] = field(default_factory=dict)  # and not scored
    scored: list[RolloutInfo] = field(default_factory=list)

    def oldest(self) -> int:
        ages = [*self.began.values(), *([self.floor] if self.waiting else [])]
        return min(ages)


class World:
    def __init__(self, setting: Setting, *, validate: bool = True) -> None:
        self.setting = setting
        if validate:
            validate_flow(
                setting.async_config(),
                setting.buffer_config(),
                batch_size=setting.batch_size,
                num_generations=setting.siblings,
                publish_every=setting.publish_every,
            )
        self.version = self.published = 0
        self.replicas = [0] * setting.replicas
        self.open: dict[int, OpenGroup] = {}
        self.buffered: dict[int, RolloutGroup] = {}  # our own copy of what the buffer must hold
        self.uses: Counter[int] = Counter()
        self.last_used: dict[int, int] = {}  # version
        self.ends: Counter[str] = Counter()
        self.next_group = 0
        self.resumed = 0
        self.trained_batches: list[list[int]] = []
        self.replayed: list[int] = []  # groups of each batch that were trained before
        self.limit = self.bound  # in force
        self.shrunk_at = -1
        self.in_training: list[RolloutGroup] | None = None  # the batch that the learner has; empty if its groups failed
        self.publish_due = False
        self.journal = Journal()
        self.new_parts()
        self.note_begin()
        self.note_loads()

    @property
    def scheduled(self) -> bool:
        return self.setting.mode != "async"

    @property
    def bound(self) -> int:
        return self.setting.async_config().bound

    @property
    def done(self) -> bool:
        return self.setting.steps is not None and self.version >= self.setting.steps

    def new_parts(self) -> None:
        s = self.setting
        self.gate: LagGate | StalenessGate = build_gate(
            s.async_config(),
            s.buffer_config(),
            batch_size=s.batch_size,
            num_generations=s.siblings,
            steps=s.steps,
        )
        self.buffer = ReplayBuffer(
            s.buffer_config(), s.async_config(), batch_size=s.batch_size, num_generations=s.siblings, seed=7
        )
        self.ledger = Ledger()
        self.ledger.note = self.journal.note

    # --- the journal

    def note_begin(self) -> None:
        s = self.setting
        sizes = {"steps": s.steps or 10**9, "batch_size": s.batch_size, "num_generations": s.siblings}
        sections = {"async": asdict(s.async_config()), "buffer": asdict(s.buffer_config())}
        self.journal.note("begin", step=self.version, publish_every=s.publish_every, **sizes, **sections)
        self.note_publish()
        self.journal.note("bound", bound=self.limit)

    def note_publish(self) -> None:
        self.journal.note("publish", version=self.published, replicas=[])
        self.journal.note("published", version=self.published)

    def note_loads(self) -> None:
        for replica in range(self.setting.replicas):
            self.note_load(replica)

    def note_load(self, replica: int) -> None:
        for event in ("load", "loaded"):
            self.journal.note(event, replica=f"g{replica}", version=self.replicas[replica])

    def broken(self) -> list[str]:
        """What the journal's replay finds of all this, which knows nothing of these books."""
        found = Findings()
        Replay(found).of(enumerate(self.journal.noted()))
        return found.sentences()

    # --- generation

    def can_admit(self, replica: int) -> bool:
        return self.gate.room(self.replicas[replica]) > 0 and self.buffer.free >= self.setting.siblings

    def admit(self, replica: int) -> bool:
        if not self.can_admit(replica):
            return False
        group_id, self.next_group = self.next_group, self.next_group + 1
        step = self.gate.admit(self.replicas[replica])
        self.buffer.reserve(self.setting.siblings)
        first = self.ledger.counts()["admitted_total"]
        ids = range(first, first + self.setting.siblings)
        for i in ids:
            self.ledger.admit(i, group_id, make_prompt(group_id), now=float(i))
        self.open[group_id] = OpenGroup(self.replicas[replica], step, set(ids))
        return True

    def waiting(self) -> list[tuple[int, int]]:
        return [(g, i) for g, group in self.open.items() for i in sorted(group.waiting)]

    def finished(self) -> list[tuple[int, int]]:
        return [(g, i) for g, group in self.open.items() for i in sorted(group.finished)]

    def running(self) -> list[tuple[int, int]]:
        return [(g, i) for g, group in self.open.items() for i in sorted(group.running)]

    def start(self, group_id: int, rollout_id: int, replica: int) -> bool:
        """Only on a replica at least as new as the one that the gate was asked about."""
        group = self.open[group_id]
        if self.replicas[replica] < group.floor:
            return False
        group.waiting.remove(rollout_id)
        group.began[rollout_id] = self.replicas[replica]
        group.running[rollout_id] = replica
        self.ledger.start(rollout_id, f"g{replica}", self.replicas[replica])
        return True

    def finish(self, group_id: int, rollout_id: int, reward: float) -> None:
        group = self.open[group_id]
        replica = group.running.pop(rollout_id)
        self.ledger.finish_generation(rollout_id)
        low, high = group.began[rollout_id], self.replicas[replica]
        group.finished[rollout_id] = make_rollout(rollout_id, group_id, low, high, reward, self.version)

    def complete(self, group_id: int, rollout_id: int, reward: float) -> None:
        self.finish(group_id, rollout_id, reward)
        self.score(group_id, rollout_id)

    def score(self, group_id: int, rollout_id: int) -> None:
        group = self.open[group_id]
        self.ledger.buffer(rollout_id)
        group.scored.append(group.finished.pop(rollout_id))
        self.close_if_complete(group_id)

    def fail(self, group_id: int, rollout_id: int) -> None:
        group = self.open[group_id]
        group.waiting.discard(rollout_id)
        group.running.pop(rollout_id, None)
        group.finished.pop(rollout_id, None)
        group.began.pop(rollout_id, None)
        self.ledger.fail(rollout_id, "the test says so")
        self.ends["failed"] += 1
        self.buffer.release(1)
        self.close_if_complete(group_id)

    def close_if_complete(self, group_id: int) -> None:
        group = self.open[group_id]
        if group.waiting or group.running or group.finished:
            return
        del self.open[group_id]
        if not group.scored:
            self.gate.release()
            if group.step is not None:
                self.buffer.close_group(group_id, group.step)
            return
        whole = RolloutGroup(group_id, tuple(group.scored), group.step)
        refused = self.buffer.add(whole)
        for r in whole.rollouts:
            if refused:
                self.ledger.drop(r.rollout_id, refused)
        if refused:
            self.ends["dropped"] += len(whole)
            self.gate.release()
        else:
            self.buffered[group_id] = whole

    def kill(self, replica: int) -> None:
        """The replica dies; what it sampled is issued again, and its successor holds the newest weights."""
        self.journal.note("died", replica=f"g{replica}", reason="the test says so")
        for group_id, rollout_id in self.running():
            group = self.open[group_id]
            if group.running[rollout_id] == replica:
                del group.running[rollout_id], group.began[rollout_id]
                group.waiting.add(rollout_id)
                self.ledger.requeue(rollout_id)
        if not self.scheduled:
            self.replicas[replica] = self.published
        self.note_load(replica)

    def abandon(self, group_id: int) -> None:
        """A group still in the making is dropped, whatever its rollouts are at."""
        group = self.open.pop(group_id)
        ids = [*group.waiting, *group.running, *group.finished, *(r.rollout_id for r in group.scored)]
        for rollout_id in ids:
            self.ledger.drop(rollout_id, "stale")
        self.ends["dropped"] += len(ids)
        self.buffer.release(len(ids))
        self.gate.release()

    def load(self, replica: int) -> None:
        if not self.scheduled:
            self.replicas[replica] = self.published
            self.note_load(replica)
            return
        while self.replicas[0] < self.published and not self.open and self.gate.room(self.replicas[0]) == 0:
            self.replicas = [version + 1 for version in self.replicas]
            self.note_loads()

    def publish(self) -> None:
        """What the learner has goes out: at once, or later than it was due."""
        if self.publish_due:
            self.published, self.publish_due = self.version, False
            self.note_publish()

    # --- training

    def follow(self) -> None:
        self.buffer.set_bound(self.limit)
        asked = self.setting.buffer_config().admission_bound(self.limit)
        self.gate.follow(self.version, self.buffer.replayed_by(self.version), asked)

    def move_bound(self, bound: int) -> None:
        """Another bound comes into force, as under async.adaptive."""
        if bound < self.limit:
            self.shrunk_at = self.version
        self.limit = bound
        self.journal.note("bound", bound=bound)
        self.evict_stale()

    def evict_stale(self) -> None:
        self.buffer.set_bound(self.limit)
        self.file(self.buffer.evict_stale(self.version))

    def purge(self) -> None:
        """The buffer is emptied of what is older than the published weights."""
        self.file(self.buffer.purge(self.published), purged=True)
        held = [group.min_version for group in self.buffer.groups()]
        assert self.scheduled or all(version >= self.published for version in held)

    def file(self, evicted: list[RolloutGroup], purged: bool = False) -> None:
        for gone in evicted:
            used = self.uses[gone.group_id]
            if not purged:
                self.check_eviction(gone)
            if self.setting.replay_fraction:
                assert gone.uses_left == (0 if used else 1)
            else:
                assert gone.uses_left == self.setting.max_reuse - used > 0
            self.gate.release(gone.uses_left)
            del self.buffered[gone.group_id]
            for r in gone.rollouts:
                self.ledger.drop(r.rollout_id, "stale")
                self.ends["trained" if used else "dropped"] += 1
        self.follow()

    def learn(self) -> bool:
        """A whole step, and its publish at once."""
        if self.in_training is None and not self.take():
            return False
        self.train()
        self.publish()
        return True

    def take(self) -> bool:
        """The learner gets its batch, if there is one."""
        self.evict_stale()
        pool = [i for i in self.buffered if self.uses[i]]
        taken = self.buffer.take(self.version, [group.oldest() for group in self.open.values()])
        if taken is None:
            return False
        self.buffer.check_batch(self.version, taken)
        ids = [t.group_id for t in taken]
        assert ids == sorted(set(ids))
        if not self.scheduled:
            assert len(taken) == self.setting.groups
        self.check_replay(taken, len(pool))
        for t in taken:
            plain = tuple(replace(r, weight=1.0, masked_before_version=0) for r in t.rollouts)
            assert plain == self.buffered[t.group_id].rollouts
            self.check_taken(t)
        self.in_training = taken
        return True

    def train(self) -> None:
        """The learner is through with its batch. A scheduled one publishes every version before the next."""
        assert self.in_training is not None
        taken, self.in_training = self.in_training, None
        ids = [t.group_id for t in taken]
        if self.scheduled:
            self.publish()
        for t in taken:
            self.uses[t.group_id] += 1
            self.last_used[t.group_id] = self.version
            assert self.uses[t.group_id] + t.uses_left == self.setting.max_reuse
            for r in t.rollouts:
                self.ledger.train(r.rollout_id, self.version, last_use=t.uses_left == 0)
            if t.uses_left == 0:
                del self.buffered[t.group_id]
                self.ends["trained"] += len(t)
        self.trained_batches.append(ids)
        self.version += 1
        self.journal.note("step", step=self.version)
        self.publish_due |= self.version % self.setting.publish_every == 0
        self.evict_stale()

    def check_replay(self, taken: list[RolloutGroup], pool: int) -> None:
        again = [t for t in taken if self.uses[t.group_id]]
        assert [t for t in taken if t.replayed] == again
        self.replayed.append(len(again))
        s = self.setting
        if not s.replay_fraction:
            return
        share = math.floor(s.groups * s.replay_fraction / (1 + s.replay_fraction) + 1e-9)
        due = min(share, pool) if self.version >= s.warmup_steps else 0
        assert len(again) <= due if s.over_stale == "wait" else len(again) == due
        for t in again:
            assert t.staleness(self.version) <= min(s.max_age or self.limit, self.limit)

    def check_eviction(self, group: RolloutGroup) -> None:
        limit = self.version - self.limit
        policy = self.setting.over_stale
        if self.setting.replay_fraction and self.uses[group.group_id]:
            return  # too old to be replayed, or in the way of fresh ones
        assert not self.scheduled and policy != "downweight"
        assert any(r.min_version < limit for r in group.rollouts)
        if policy == "mask":
            assert all(r.max_version < limit for r in group.rollouts)
        if policy == "wait":
            assert self.uses[group.group_id] > 0, "over_stale=wait dropped a group that was never trained"

    def check_taken(self, taken: RolloutGroup) -> None:
        limit = self.version - (self.bound if self.scheduled else self.limit)
        assert 0 < taken.rollouts[0].weight <= 1
        if self.scheduled:
            for r in taken.rollouts:
                exact = max(0, limit)
                assert exact <= r.min_version <= r.max_version <= max(exact, self.resumed)
            return
        age = max(r.staleness(self.version) for r in taken.rollouts)
        if self.setting.over_stale == "mask":
            assert taken.rollouts[0].masked_before_version == max(0, limit)
            assert any(r.max_version >= limit for r in taken.rollouts)
        elif self.setting.over_stale == "downweight":
            assert taken.rollouts[0].weight <= min(1.0, (self.limit + 1) / (age + 1))
        else:
            assert age <= (self.bound if self.setting.over_stale == "wait" else self.limit)

    # --- books

    def audit(self) -> None:
        self.ledger.check()
        counts = self.ledger.counts()
        scored = sum(len(g.scored) for g in self.open.values())
        in_flight = len(self.waiting()) + len(self.running()) + len(self.finished()) + scored
        held = sum(len(group) for group in self.buffered.values())
        leaving = sum(len(group) for group in self.in_training or () if group.uses_left == 0)
        assert counts["admitted_total"] == self.next_group * self.setting.siblings
        assert counts["admitted"] == len(self.waiting())
        assert counts["generating"] == len(self.running())
        assert counts["scoring"] == len(self.finished())
        assert counts["buffered"] == held + scored
        assert {k: counts[k] for k in ("trained", "dropped", "failed")} == {
            k: self.ends[k] for k in ("trained", "dropped", "failed")
        }
        assert (self.buffer.held, self.buffer.reserved) == (held - leaving, in_flight)
        assert held - leaving + in_flight + self.buffer.free == self.buffer.capacity
        assert self.ledger.live_ids() == sorted(self.places()), "an id is in two places, or in none"
        assert self.scheduled or self.gate.state_dict()["places"] >= 0
        assert self.buffer.free >= 0
        assert all(count <= self.setting.max_reuse for count in self.uses.values())

    def places(self) -> list[int]:
        """The ids of all that lives, once for each place that has it."""
        groups = self.open.values()
        at_work = [i for g in groups for i in (*g.waiting, *g.running, *g.finished, *(r.rollout_id for r in g.scored))]
        return at_work + [r.rollout_id for group in self.buffered.values() for r in group.rollouts]

    def checkpoint(self) -> None:
        """Write and read everything; what was in flight is issued again, as after a crash."""
        saved = json.loads(
            json.dumps([self.gate.state_dict(), self.buffer.state_dict(), self.ledger.state_dict()], allow_nan=False)
        )
        payloads = {r.rollout_id: r.payload for g in self.buffered.values() for r in g.rollouts}
        self.new_parts()
        self.publish_due = False
        self.gate.load_state_dict(saved[0], self.version)
        self.buffer.load_state_dict(saved[1], payloads, self.version)
        self.ledger.load_state_dict(saved[2])
        self.follow()
        self.resumed = self.published = self.version
        self.replicas = [self.version] * self.setting.replicas
        self.note_begin()
        for group in self.open.values():
            again = [*group.running, *group.finished]
            for rollout_id in again:
                self.ledger.requeue(rollout_id)
            group.waiting.update(again)
            scored = {r.rollout_id for r in group.scored}
            group.began = {i: version for i, version in group.began.items() if i in scored}
            group.running, group.finished = {}, {}
        self.note_loads()

    def settle(self) -> None:
        """Everything in flight finishes, replicas load what was published, and admission takes what it may."""
        self.publish()
        for replica in range(self.setting.replicas):
            self.load(replica)
            while self.admit(replica):
                pass
        for group_id, rollout_id in self.waiting():
            assert any(self.start(group_id, rollout_id, r) for r in range(self.setting.replicas))
        for group_id, rollout_id in self.running():
            self.finish(group_id, rollout_id, float(rollout_id % 2))
        for group_id, rollout_id in self.finished():
            self.score(group_id, rollout_id)

    def step(self, attempts: int = 6) -> bool:
        """One learner step from any state; False is a deadlock."""
        for _ in range(attempts):
            if self.learn():
                return True
            self.settle()
        return False
