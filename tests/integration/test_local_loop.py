"""The real controller on the virtual clock: modes, bounds, failures, deaths, resume."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalRuntime
from asyncrlhf.errors import AsyncRLHFError, ReplicaError
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from tests.loop import FAKE, Finished, meddle, run, train_nothing

SMALL = ("steps=5", "batch_size=16", "learner.learning_rate=1e-4")
TAIL = (
    "generator.fake.tail_probability=0.02",
    "generator.fake.latency_max_ratio=50",
    "generator.fake.latency_median=0.05",
)


def test_lag_zero_is_synchronous_bit_for_bit(tmp_path: Path) -> None:
    for seed in (0, 1):
        common = (*SMALL, "checkpoint.every=5", f"seed={seed}")
        sync = run(tmp_path / f"sync{seed}", *common, "async.mode=sync")
        free = run(tmp_path / f"async{seed}", *common, "async.mode=async", "async.max_staleness=0")
        assert sync.untimed_metrics == free.untimed_metrics
        assert sync.weights_digest() == free.weights_digest()
        assert [row["staleness_max"] for row in sync.metrics] == [0] * 5
        for one, other in zip(sync.trained.itertuples(), free.trained.itertuples(), strict=True):
            assert (one.prompt, one.response, one.reward) == (other.prompt, other.response, other.reward)
            assert np.array_equal(one.behavior_logprobs, other.behavior_logprobs)


def test_fixed_lag_is_exact_and_repeatable(tmp_path: Path) -> None:
    options = ("steps=8", "batch_size=16", "learner.learning_rate=1e-4", "async.mode=fixed_lag", "async.lag=4")
    first = run(tmp_path / "a", *options, "generator.replicas=2")
    second = run(tmp_path / "b", *options, "generator.replicas=2", "learner.virtual_step_seconds=0.7")
    assert first.untimed_metrics == second.untimed_metrics
    for row in first.trained.itertuples():
        (step,) = row.consumed_at_version
        assert set(row.policy_versions) == {max(0, step - 4)}


def test_one_step_is_one_step_behind(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "async.mode=one_step")
    assert [row["staleness_mean"] for row in done.metrics] == [0, 1, 1, 1, 1]


@pytest.mark.in_turn
@pytest.mark.more
def test_long_tails_pass_neither_the_bound_nor_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_nothing(monkeypatch)
    done = run(
        tmp_path, *FAKE, *TAIL, "steps=300", "generator.replicas=4", "async.max_staleness=2",
        "learner.virtual_step_seconds=0.1", "fusion.max_wait_ms=0",
    )  # fmt: skip
    done.assert_ledger_whole()
    trained = done.trained
    assert (trained.staleness <= 2).all()
    for row in trained.itertuples():
        assert row.consumed_at_version[0] - min(row.policy_versions) == row.staleness
    assert done.summary["ledger"]["dropped"]["stale"] > 0, "the tail was meant to be met by the bound"
    ideal = 300 * 0.1
    assert ideal / done.metrics[-1]["wall_time"] >= 0.9


@pytest.mark.in_turn
@pytest.mark.parametrize("policy", ["drop", "mask", "wait", "downweight"])
@pytest.mark.more_but("drop", "downweight")
def test_stragglers_are_met_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    train_nothing(monkeypatch)
    done = run(
        tmp_path, *FAKE, *TAIL, "steps=60", "generator.replicas=2", "async.max_staleness=1",
        f"async.over_stale={policy}", "learner.virtual_step_seconds=0.1",
    )  # fmt: skip
    done.assert_ledger_whole()
    dropped, over = done.summary["ledger"]["dropped"].get("stale", 0), (done.trained.staleness > 1).sum()
    if policy == "drop":
        assert dropped > 0 and over == 0
    elif policy == "wait":
        assert dropped == 0 and over == 0
        assert done.metrics[-1]["wall_time"] > 60 * 0.1 * 1.1, "waiting for stragglers has a price"
    elif policy == "downweight":
        assert dropped == 0 and over > 0
    else:
        assert over > 0, "a straggler is trained on, without its stale tokens"
        for _, group in done.trained[done.trained.staleness > 1].groupby("group_id"):
            whole = done.trained[done.trained.group_id == group.group_id.iloc[0]]
            newest = max(max(versions) for versions in whole.policy_versions)
            assert newest >= group.consumed_at_version.iloc[0][-1] - 1, "the whole group was too old, and trained"


@pytest.mark.parametrize("update", ["drain", "interrupt", "in_flight"])
def test_weight_updates_in_mid_sequence(tmp_path: Path, update: str) -> None:
    done = run(
        tmp_path, "steps=8", "batch_size=16", "generator.slots=16", "learner.learning_rate=1e-4",
        f"async.on_weight_update={update}", "weights.audit_every=1", "learner.virtual_step_seconds=0.03",
    )  # fmt: skip
    done.assert_ledger_whole()
    mixed = [len(set(row.policy_versions)) > 1 for row in done.trained.itertuples()]
    assert any(mixed) == (update != "drain")
    for row in done.trained.itertuples():
        assert (np.diff(row.policy_versions) >= 0).all()


def kill_at(*times: float, which: int = 0) -> object:
    def action(runtime: LocalRuntime) -> None:
        def strike() -> None:
            victim = runtime.generators[which]
            assert isinstance(victim, LocalGenerator)
            victim.kill("struck by the test")

        for moment in times:
            asyncio.get_running_loop().call_later(moment, strike)

    return action


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", [("async.mode=async",), ("async.mode=sync",), ("async.mode=fixed_lag", "async.lag=2")])
@pytest.mark.more_but(every=3)
def test_a_killed_generator_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: tuple[str]) -> None:
    runtimes = meddle(monkeypatch, kill_at(0.52, 1.13))
    done = run(tmp_path, *FAKE, *mode, "steps=40", "generator.replicas=3", "learner.virtual_step_seconds=0.05")
    done.assert_ledger_whole()
    assert done.summary["ledger"]["trained"] == 40 * 16
    assert len(runtimes[0].generators) == 3
    if mode[0].endswith("fixed_lag"):
        assert all(max(r.policy_versions) == max(0, r.consumed_at_version[0] - 2) for r in done.trained.itertuples())


def test_the_run_ends_when_every_restart_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meddle(monkeypatch, kill_at(*np.arange(0.1, 3, 0.1).tolist()))
    with pytest.raises(ReplicaError, match="no generator is left: generator-0 died after 2 restarts"):
        run(tmp_path, *FAKE, "steps=500", "max_restarts=2")


def test_resume_goes_on_bit_for_bit(tmp_path: Path) -> None:
    common = (
        "batch_size=16",
        "learner.learning_rate=1e-4",
        "async.mode=fixed_lag",
        "async.lag=1",
        "checkpoint.every=3",
    )
    whole = run(tmp_path / "whole", *common, "steps=6")
    folder = tmp_path / "parts"
    config = (*common, "steps=6", "checkpoint.resume=auto")
    interrupt_after(folder, 3, *config)
    resumed = run(folder, *config)
    # The resumed run audits its weights once more at its start, and so knows a newer mismatch_kl.
    without_audit = [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in whole.untimed_metrics]
    assert without_audit == [{k: v for k, v in row.items() if k != "mismatch_kl"} for row in resumed.untimed_metrics]
    assert whole.weights_digest() == resumed.weights_digest()
    resumed.assert_ledger_whole()
    assert list(whole.trained.response) == list(resumed.trained.response)


def interrupt_after(folder: Path, step: int, *options: str) -> Finished:
    """A run stopped as Ctrl-C stops it, in the midst of its work."""
    original = LearnLoop._drop_late

    def drop_late(self: LearnLoop) -> None:
        original(self)
        if self.state.version == step:
            self.state.stopping = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnLoop, "_drop_late", drop_late)
        stopped = run(folder, *options)
    assert stopped.summary["exit_reason"] == "interrupted"
    assert stopped.summary["ledger"]["adds_up"]
    return stopped


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.thorough_but("extra1")
@pytest.mark.parametrize("extra", [(), ("buffer.max_reuse=2", "async.max_staleness=3"), ("async.over_stale=wait",)])
def test_an_interrupted_free_run_keeps_its_totals(tmp_path: Path, extra: tuple[str, ...]) -> None:
    options = (*FAKE, *TAIL, "generator.replicas=2", "steps=40", "checkpoint.resume=auto", *extra)
    interrupt_after(tmp_path, 13, *options)
    interrupt_after(tmp_path, 27, *options)
    resumed = run(tmp_path, *options)
    resumed.assert_ledger_whole()
    assert [row["step"] for row in resumed.metrics] == list(range(1, 41))
    uses = list(itertools.chain.from_iterable(resumed.trained.consumed_at_version))
    assert len(uses) == 40 * 16, "each step trained its batch once, neither lost nor repeated by the resume"
    assert (resumed.trained.staleness <= 3).all()


def test_a_full_buffer_holds_the_generators_back(tmp_path: Path) -> None:
    done = run(tmp_path, *FAKE, "steps=20", "buffer.capacity=20", "async.max_staleness=8", "generator.replicas=2")
    done.assert_ledger_whole()
    assert max(row["buffer_size"] + row["rollouts_in_flight"] for row in done.metrics) <= 20


def test_single_failures_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    target = "reward.target=tests.reward_functions:half_failing"
    done = run(tmp_path, *FAKE, "steps=20", "reward.kind=python", target)
    done.assert_ledger_whole()
    failed = done.rollouts[done.rollouts.state == "failed"]
    assert len(failed) == sum(done.summary["ledger"]["failed"].values()) > 0
    assert failed.drop_reason.str.contains("cannot judge this").all()
    assert failed.reward.isna().all()


def test_mass_failure_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    target = "reward.target=tests.reward_functions:always_failing"
    with pytest.raises(AsyncRLHFError, match=r"of the last 16 rollouts failed .* never satisfied"):
        run(tmp_path, *FAKE, "steps=20", "reward.kind=python", target, "generator.fake.correct_probability=0.1")


def test_generation_failures_are_counted(tmp_path: Path) -> None:
    done = run(tmp_path, *FAKE, "steps=20", "generator.fake.failure_probability=0.05")
    done.assert_ledger_whole()
    assert sum(done.summary["ledger"]["failed"].values()) > 0


@pytest.mark.in_turn
@pytest.mark.more
def test_fusion_changes_when_not_what(tmp_path: Path) -> None:
    options = (*SMALL, "async.mode=sync")
    runs = [run(tmp_path / how, *options, f"fusion.granularity={how}") for how in ("rollout", "group", "batch")]
    rewards = [[round(row["reward_mean"], 6) for row in done.metrics] for done in runs]
    assert rewards[1] == pytest.approx(rewards[0])
    assert rewards[2] == pytest.approx(rewards[0])
