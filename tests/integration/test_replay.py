"""Replay, reuse and the purge through the whole loop: many generators, long tails, virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.cluster.local_runtime import LocalLearner
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.types import RolloutGroup, RolloutInfo
from tests.integration.test_local_loop import interrupt_after
from tests.loop import FAKE, Finished, run, train_nothing

EIGHT = (
    *FAKE,
    "generator.replicas=8",
    "generator.slots=4",
    "generator.fake.tail_probability=0.02",
    "generator.fake.latency_max_ratio=30",
    "generator.fake.latency_median=0.05",
    "learner.virtual_step_seconds=0.1",
    "fusion.max_wait_ms=0",
)


def uses(done: Finished) -> pd.DataFrame:
    """One row a training of a rollout: the step's version, the rollout's age then, and which use it was."""
    rows = [
        {"id": r.rollout_id, "group": r.group_id, "version": v, "age": v - min(r.policy_versions), "use": use}
        for r in done.trained.itertuples()
        for use, v in enumerate(r.consumed_at_version)
    ]
    return pd.DataFrame(rows)


def check_uses(done: Finished, steps: int, bound: int, most: int) -> pd.DataFrame:
    """Every step trained one batch of whole groups, nothing over the bound at any use, and the metrics say the same."""
    done.assert_ledger_whole()
    table = uses(done)
    assert (table.age <= bound).all() and (table.age >= 0).all()
    assert table.use.max() < most
    assert Counter(table.version) == {v: 16 for v in range(steps)}
    assert len(table) == done.summary["ledger"]["uses"] == 16 * steps
    for r in done.trained.itertuples():
        assert (np.diff(r.consumed_at_version) > 0).all(), "twice in one step"
        assert r.staleness == r.consumed_at_version[-1] - min(r.policy_versions)
    for row in done.metrics:
        at = table[table.version == row["step"] - 1]
        assert row["staleness_max"] == at.age.max()
        assert row["staleness_mean"] == pytest.approx(at.age.mean())
        assert row["replayed_fraction"] == pytest.approx((at.use > 0).mean())
        assert row["staleness_bound"] == bound
    return table


@pytest.mark.in_turn
@pytest.mark.parametrize("reuse", [2, 3])
@pytest.mark.more_but(every=2)
def test_reuse_trains_each_rollout_as_often_as_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: int) -> None:
    train_nothing(monkeypatch)
    done = run(tmp_path, *EIGHT, "steps=40", "async.max_staleness=4", f"buffer.max_reuse={reuse}")
    check_uses(done, 40, bound=4, most=reuse)
    early = done.trained[done.trained.rollout_id < 160]
    whole = early.consumed_at_version.map(len) == reuse
    assert whole.mean() > 0.7, "stragglers may run out of time, the others are trained as often as set"
    assert done.summary["ledger"]["trained"] < 40 * 16 / reuse * 1.3


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("policy", "sampling"), [("drop", "uniform"), ("mask", "reward_spread"), ("wait", "age"), ("downweight", "lifo")]
)
@pytest.mark.more_but(every=4)
def test_replay_beside_fresh_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, sampling: str
) -> None:
    train_nothing(monkeypatch)
    options = (*EIGHT, "steps=40", "async.max_staleness=6", "buffer=fresh_replay", f"buffer.sampling={sampling}")
    done = run(tmp_path, *options, "buffer.warmup_steps=10", "buffer.max_age=5", f"async.over_stale={policy}")
    if policy in ("drop", "wait"):
        check_uses(done, 40, bound=6, most=4)
    done.assert_ledger_whole()
    table = uses(done)
    assert (table[table.use > 0].age <= 5).all()
    assert (table[table.version < 10].use == 0).all()
    # Four groups a batch: one of them from replay (0.5 / 1.5 x 4), wherever there is one.
    replayed = table[table.use > 0].groupby("version").group.nunique()
    assert (replayed <= 1).all() and len(replayed) > 24
    if policy == "wait":
        assert done.summary["ledger"]["dropped"].get("stale", 0) == 0


def test_replay_spends_fewer_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_nothing(monkeypatch)
    options = (*FAKE, "steps=40", "async.max_staleness=8", "generator.replicas=2")
    plain = run(tmp_path / "plain", *options)
    again = run(tmp_path / "again", *options, "buffer.replay_fraction=1", "buffer.max_reuse=4")
    check_uses(again, 40, bound=8, most=4)
    share = again.summary["ledger"]["admitted"] / plain.summary["ledger"]["admitted"]
    assert 0.45 < share < 0.6


@pytest.mark.in_turn
@pytest.mark.more
def test_an_interrupted_replay_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_nothing(monkeypatch)
    options = (*EIGHT, "steps=40", "async.max_staleness=6", "buffer=fresh_replay", "buffer.warmup_steps=3")
    options = (*options, "checkpoint.resume=auto")
    interrupt_after(tmp_path, 13, *options)
    interrupt_after(tmp_path, 27, *options)
    check_uses(run(tmp_path, *options), 40, bound=6, most=4)


@pytest.mark.in_turn
@pytest.mark.parametrize("extra", [(), ("buffer.max_reuse=2",), ("buffer.replay_fraction=1", "buffer.max_reuse=2")])
@pytest.mark.parametrize("update", ["drain", "in_flight"])
@pytest.mark.more_but("in_flight-extra2")
@pytest.mark.thorough_but(every=3)
def test_purge_empties_the_buffer_at_each_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, extra: tuple[str, ...]
) -> None:
    purges: list[int] = []
    dropped = 0
    original_purge, original_step = Assembly.drop_begun_before, LearnLoop._step

    def purge(self: Assembly, version: int) -> None:
        nonlocal dropped
        before = self._state.buffer.held
        original_purge(self, version)
        purges.append(version)
        dropped += before - self._state.buffer.held
        assert all(group.min_version >= version for group in self._state.buffer.groups())
        self._state.ledger.check()

    async def step(self: LearnLoop, taken: list[RolloutGroup], waited: float) -> None:
        assert purges[-1] == self.state.published_version
        # Nothing is being sampled when drained replicas load, so that all that is trained is of the newest policy.
        assert update != "drain" or all(t.min_version >= purges[-1] for t in taken)
        await original_step(self, taken, waited)

    monkeypatch.setattr(Assembly, "drop_begun_before", purge)
    monkeypatch.setattr(LearnLoop, "_step", step)
    done = run(
        tmp_path, *FAKE, "generator.replicas=8", "generator.slots=4", "learner.virtual_step_seconds=0.1", "steps=40",
        "async.max_staleness=8", "weights.publish_every=4", "algorithm=oapl", f"async.on_weight_update={update}",
        *extra,
    )  # fmt: skip
    done.assert_ledger_whole()
    assert len(purges) > 6 and dropped > 0
    table = uses(done)
    assert (table.age <= 8).all()
    if extra:
        assert table.use.max() == 1, "between two publishes a group may be trained twice"
    else:
        assert done.summary["ledger"]["dropped"]["stale"] == dropped


def test_purge_with_nothing_to_purge_changes_nothing(tmp_path: Path) -> None:
    options = (*FAKE, "steps=6", "algorithm=oapl", "async.max_staleness=0")
    with_purge = run(tmp_path / "a", *options)
    without = run(tmp_path / "b", *options, "algorithm.purge_on_publish=false")
    assert with_purge.untimed_metrics == without.untimed_metrics


def test_reuse_that_a_purge_forbids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="purge_on_publish empties the buffer after every step"):
        run(tmp_path, *FAKE, "algorithm=oapl", "async.max_staleness=4", "buffer.max_reuse=2")


@pytest.mark.in_turn
@pytest.mark.parametrize(("exponent", "least"), [(1.0, 0.0), (0.5, 0.0), (0.0, 1.0)])
@pytest.mark.more_but(every=2)
def test_the_correction_reaches_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exponent: float, least: float
) -> None:
    """Weights below 1 where a group was likely to be drawn, unless nothing is to be corrected."""
    weights: list[list[float]] = []
    original = LocalLearner.train

    async def train(self: LocalLearner, items: Sequence[RolloutInfo]) -> StepResult:
        weights.append([item.weight for item in items])
        return await original(self, items)

    monkeypatch.setattr(LocalLearner, "train", train)
    options = (*FAKE, "steps=8", "async.max_staleness=6", "buffer=priority", "generator.fake.correct_probability=0.5")
    run(tmp_path, *options, f"buffer.sampling_correction={exponent}")
    flat = np.array(weights)
    assert (flat.max(axis=1) == 1.0).all()
    assert (flat.min() < 0.9) if least == 0.0 else (flat == 1.0).all()
    assert all(len(set(row[i : i + 4])) == 1 for row in flat for i in range(0, 16, 4)), "one weight a group"


@pytest.mark.in_turn
@pytest.mark.parametrize("preset", ["fifo", "freshest", "replay", "priority", "fresh_replay"])
@pytest.mark.more_but("replay", "priority")
def test_buffer_presets_run_under_the_default_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    train_nothing(monkeypatch)
    done = run(tmp_path, *FAKE, "steps=30", f"buffer={preset}", "generator.replicas=2")
    done.assert_ledger_whole()
    assert (done.trained.staleness <= 2).all()
