"""The whole flow under random schedules: nothing lost, nothing over the bound, nothing stuck."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrlhf.errors import ConfigError, LedgerError
from tests.unit.buffer.world import Setting, World


@st.composite
def free_settings(draw: st.DrawFn) -> Setting:
    eta = draw(st.integers(0, 4))
    publish_every = draw(st.integers(1, eta + 1))
    groups, siblings = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    extra = draw(st.one_of(st.none(), st.integers(0, 2 * siblings)))
    return Setting(
        eta=eta,
        over_stale=draw(st.sampled_from(["drop", "mask", "wait", "downweight"])),
        sampling=draw(st.sampled_from(["fifo", "lifo", "uniform", "reward_spread", "advantage", "age"])),
        max_reuse=draw(st.integers(1, eta + 2 - publish_every)),
        publish_every=publish_every,
        groups=groups,
        siblings=siblings,
        capacity=0 if extra is None else groups * siblings + extra,
        filter_zero_spread=siblings > 1 and draw(st.booleans()),
        steps=draw(st.one_of(st.none(), st.integers(1, 6))),
        replicas=draw(st.integers(1, 3)),
    )


@st.composite
def replay_settings(draw: st.DrawFn) -> Setting:
    eta = draw(st.integers(1, 6))
    max_age = draw(st.integers(0, eta))
    least = draw(st.integers(0, eta - 1))
    groups, siblings = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    extra = draw(st.one_of(st.none(), st.integers(0, 2 * siblings)))
    return Setting(
        eta=eta,
        over_stale=draw(st.sampled_from(["drop", "mask", "wait", "downweight"])),
        sampling=draw(st.sampled_from(["fifo", "lifo", "uniform", "reward_spread"])),
        max_reuse=draw(st.integers(2, 4)),
        publish_every=draw(st.integers(1, min(max_age or least, least) // 2 + 1)),
        groups=groups,
        siblings=siblings,
        capacity=0 if extra is None else 2 * groups * siblings + extra,
        filter_zero_spread=siblings > 1 and draw(st.booleans()),
        steps=draw(st.one_of(st.none(), st.integers(1, 8))),
        replicas=draw(st.integers(1, 2)),
        replay_fraction=draw(st.sampled_from([1.0, 2.0, 5.0])),
        max_age=max_age,
        warmup_steps=draw(st.integers(0, 4)),
        adaptive=True,
        min_staleness=least,
    )


@st.composite
def moving_settings(draw: st.DrawFn) -> Setting:
    """Without replay, with a bound that moves."""
    setting = draw(free_settings())
    least = draw(st.integers(setting.max_reuse + setting.publish_every - 2, setting.eta))
    assume(least < setting.eta)
    return replace(setting, adaptive=True, min_staleness=least)


@st.composite
def scheduled_settings(draw: st.DrawFn) -> Setting:
    mode = draw(st.sampled_from(["sync", "one_step", "fixed_lag"]))
    lag = {"sync": 0, "one_step": 1}.get(mode) if mode != "fixed_lag" else draw(st.integers(0, 4))
    groups, siblings = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    assert lag is not None
    return Setting(
        mode=mode,
        eta=lag,
        groups=groups,
        siblings=siblings,
        capacity=draw(st.sampled_from([0, (lag + 1) * groups * siblings])),
        filter_zero_spread=siblings > 1 and draw(st.booleans()),
        steps=draw(st.one_of(st.none(), st.integers(1, 6))),
        replicas=draw(st.integers(1, 3)),
    )


class Flow(RuleBasedStateMachine):
    """Rules are what can happen to a run; invariants are what its user is promised."""

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.world.admit(data.draw(st.integers(0, self.world.setting.replicas - 1)))

    @precondition(lambda self: self.world.waiting())
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        group_id, rollout_id = data.draw(st.sampled_from(self.world.waiting()))
        self.world.start(group_id, rollout_id, data.draw(st.integers(0, self.world.setting.replicas - 1)))

    @precondition(lambda self: self.world.running())
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, data: st.DataObject, reward: float) -> None:
        self.world.finish(*data.draw(st.sampled_from(self.world.running())), reward)

    @precondition(lambda self: self.world.finished())
    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        self.world.score(*data.draw(st.sampled_from(self.world.finished())))

    @precondition(lambda self: self.world.open)
    @rule()
    def finish_the_newest_group(self) -> None:
        """Fresh groups overtake the stragglers."""
        world, newest = self.world, max(self.world.open)
        for group_id, rollout_id in world.waiting():
            if group_id == newest:
                assert any(world.start(group_id, rollout_id, r) for r in range(world.setting.replicas))
        for group_id, rollout_id in world.running():
            if group_id == newest:
                world.finish(group_id, rollout_id, float(rollout_id % 2))
        for group_id, rollout_id in world.finished():
            if group_id == newest:
                world.score(group_id, rollout_id)

    @precondition(lambda self: any(len(g.scored) < self.world.setting.siblings for g in self.world.open.values()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        world = self.world
        world.fail(*data.draw(st.sampled_from(world.waiting() + world.running() + world.finished())))

    @precondition(lambda self: self.world.open and not self.world.scheduled)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """What over_stale=drop does with a group that is too late already."""
        if self.world.setting.over_stale == "drop":
            self.world.abandon(data.draw(st.sampled_from(sorted(self.world.open))))

    @precondition(lambda self: self.world.ledger.live_ids())
    @rule(data=st.data())
    def what_is_out_of_turn_is_refused_and_changes_nothing(self, data: st.DataObject) -> None:
        """A late result of a replica that died, a second score, a second training at one version, and the like."""
        ledger, before = self.world.ledger, json.dumps(self.world.ledger.state_dict())
        rollout_id = data.draw(st.sampled_from(ledger.live_ids()))
        last = self.world.last_used.get(rollout_id // self.world.setting.siblings, -1)
        calls: tuple[tuple[Callable[[], None], set[str]], ...] = (
            (lambda: ledger.start(rollout_id, "g0", 0), {"admitted"}),
            (lambda: ledger.finish_generation(rollout_id), {"generating"}),
            (lambda: ledger.buffer(rollout_id), {"scoring"}),
            (lambda: ledger.train(rollout_id, last, True), set() if last >= 0 else {"buffered"}),
            (lambda: ledger.requeue(rollout_id), {"generating", "scoring"}),
            (lambda: ledger.fail(rollout_id, "late"), {"admitted", "generating", "scoring"}),
        )
        entry = ledger.get(rollout_id)
        assert entry is not None
        for call, allowed in calls:
            if entry.state not in allowed:
                with pytest.raises(LedgerError):
                    call()
        assert json.dumps(ledger.state_dict()) == before

    @rule(data=st.data())
    def kill_or_load(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, self.world.setting.replicas - 1))
        (self.world.kill if data.draw(st.integers(0, 4)) == 0 else self.world.load)(replica)

    @precondition(lambda self: not self.world.done)
    @rule()
    def learn(self) -> None:
        self.world.learn()

    @precondition(lambda self: not self.world.done and self.world.in_training is None)
    @rule()
    def take(self) -> None:
        """The learner has a batch and is at it, while everything else goes on."""
        self.world.take()

    @precondition(lambda self: self.world.in_training is not None)
    @rule()
    def train(self) -> None:
        self.world.train()

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @precondition(lambda self: self.world.in_training is None)
    @rule()
    def crash_and_resume(self) -> None:
        self.world.checkpoint()

    @precondition(lambda self: not self.world.done)
    @rule()
    def never_stuck(self) -> None:
        assert self.world.step(), f"deadlock at version {self.world.version}"

    @precondition(lambda self: self.world.setting.adaptive and self.world.in_training is None)
    @rule(data=st.data())
    def move_the_bound(self, data: st.DataObject) -> None:
        self.world.move_bound(data.draw(st.integers(self.world.setting.min_staleness, self.world.setting.eta)))

    @precondition(lambda self: self.world.in_training is None)
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 2)) == 0:
            self.world.purge()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.audit()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(world.setting.eta + 3):
            assert world.done or world.step(), f"deadlock at version {world.version}"
        if world.in_training is not None:
            world.train()
        assert world.broken() == []
        for rollout_id in world.ledger.live_ids():
            world.ledger.drop(rollout_id, "shutdown")
        counts = world.ledger.counts()
        assert counts["trained"] + counts["dropped"] + counts["failed"] == counts["admitted_total"]
        world.ledger.check()


class FreeFlow(Flow):
    @initialize(setting=free_settings())
    def begin(self, setting: Setting) -> None:
        self.world = World(setting)


class ReplayFlow(Flow):
    @initialize(setting=replay_settings())
    def begin(self, setting: Setting) -> None:
        self.world = World(setting)


class MovingFlow(Flow):
    @initialize(setting=moving_settings())
    def begin(self, setting: Setting) -> None:
        self.world = World(setting)


class WaitFlow(Flow):
    """``over_stale=wait`` alone: the claim that it never drops and never passes the bound is the hardest to keep."""

    @initialize(setting=free_settings())
    def begin(self, setting: Setting) -> None:
        assume(setting.eta > 0 and setting.groups < 3)
        self.world = World(Setting(**{**vars(setting), "over_stale": "wait"}))


class ScheduledFlow(Flow):
    @initialize(setting=scheduled_settings())
    def begin(self, setting: Setting) -> None:
        self.world = World(setting)


relaxed = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFreeFlow = FreeFlow.TestCase
TestFreeFlow.settings = relaxed
TestReplayFlow = ReplayFlow.TestCase
TestReplayFlow.settings = relaxed
TestMovingFlow = MovingFlow.TestCase
TestMovingFlow.settings = relaxed
TestWaitFlow = WaitFlow.TestCase
TestWaitFlow.settings = relaxed
TestScheduledFlow = ScheduledFlow.TestCase
TestScheduledFlow.settings = relaxed


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [FreeFlow, ReplayFlow, MovingFlow, WaitFlow, ScheduledFlow])
def test_many_more_schedules(machine: type[Flow]) -> None:
    run_state_machine_as_test(machine, settings=settings(relaxed, max_examples=1000))


@pytest.mark.parametrize("over_stale", ["drop", "mask", "wait", "downweight"])
@pytest.mark.parametrize("sampling", ["fifo", "lifo", "uniform", "reward_spread"])
def test_long_tailed_run_keeps_the_bound(over_stale: str, sampling: str) -> None:
    """150 steps with stragglers fifty times slower than the median: 1 in 20 groups sits out for long."""
    world = World(Setting(eta=2, over_stale=over_stale, sampling=sampling, groups=4, siblings=1, replicas=4))
    rng = np.random.default_rng(3)
    due: dict[int, float] = {}
    now = 0.0
    while world.version < 150:
        now += 1.0
        for replica in range(4):
            world.load(replica)
            while world.admit(replica):
                due[world.next_group - 1] = now + (50.0 if rng.random() < 0.05 else rng.exponential(1.0))
        for group_id, rollout_id in world.waiting():
            assert any(world.start(group_id, rollout_id, r) for r in range(4))
        for group_id, rollout_id in world.running():
            if due[group_id] <= now:
                world.complete(group_id, rollout_id, rng.random())
        world.learn()
        world.audit()
    assert now < 150 * 60, "the loop all but stood still"
    if over_stale != "drop":
        assert world.ends["dropped"] == 0 or over_stale == "mask"


@pytest.mark.parametrize("seed", range(12))
def test_wait_never_drops_when_many_stragglers_are_overtaken(seed: int) -> None:
    """A third of the groups finish late and the newest first: looking one step ahead would not do here."""
    rng = np.random.default_rng(seed)
    eta, groups = 2 + seed % 3, 1 + seed % 2
    world = World(Setting(eta=eta, over_stale="wait", sampling="lifo", groups=groups, siblings=1, replicas=2))
    late: set[int] = set()
    while world.version < 40:
        for replica in range(2):
            world.load(replica)
            while world.admit(replica):
                if rng.random() < 0.35:
                    late.add(world.next_group - 1)
        for group_id, rollout_id in world.waiting():
            assert any(world.start(group_id, rollout_id, r) for r in range(2))
        while not world.learn():
            prompt = [pair for pair in world.running() if pair[0] not in late]
            world.complete(*(prompt[-1] if prompt else world.running()[-1]), reward=1.0)
        world.audit()
    assert world.ends["dropped"] == 0


def test_lag_zero_and_staleness_zero_train_on_the_same_groups() -> None:
    batches = []
    for setting in (Setting(eta=0), Setting(mode="sync", eta=0)):
        world = World(setting)
        assert all(world.step() for _ in range(8))
        batches.append(world.trained_batches)
    assert batches[0] == batches[1] == [[2 * t, 2 * t + 1] for t in range(8)]


@pytest.mark.parametrize("eta", range(4))
@pytest.mark.parametrize("publish_every", range(1, 6))
def test_publish_every_is_refused_exactly_where_the_run_would_stop(eta: int, publish_every: int) -> None:
    setting = Setting(eta=eta, publish_every=publish_every)
    world = World(setting, validate=False)
    runs = all(world.step(attempts=4) for _ in range(12))
    if runs:
        World(setting)
    else:
        with pytest.raises(ConfigError, match="publish_every"):
            World(setting)


@pytest.mark.parametrize(("mode", "lag"), [("sync", 0), ("one_step", 1), ("fixed_lag", 4)])
def test_nothing_is_left_over_when_the_steps_are_known(mode: str, lag: int) -> None:
    for setting in (Setting(mode=mode, eta=lag, steps=7), Setting(eta=lag, steps=7)):
        world = World(setting)
        while not world.done:
            assert world.step()
        world.settle()
        assert world.ledger.counts()["trained"] == world.ledger.counts()["admitted_total"] == 7 * setting.batch_size


def test_reuse_trains_each_group_as_often_as_allowed() -> None:
    world = World(Setting(eta=3, max_reuse=2, groups=2, siblings=1))
    assert all(world.step() for _ in range(40))
    counts = world.ledger.counts()
    assert counts["uses"] == 80
    assert counts["dropped"] == 0
    # Half as many rollouts as places: every group that ended had both its uses.
    assert 38 <= counts["trained"] <= 40
