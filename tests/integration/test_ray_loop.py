"""The real controller on a real Ray: transports, modes, bounds, two learner ranks."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrlhf
from asyncrlhf.cluster.ray_handles import RayLearner
from asyncrlhf.errors import ReplicaError
from tests.loop import FAKE, Finished
from tests.loop import run as local_run
from tests.numeric import assert_close
from tests.ray_run import RAY, before, run, strike, watch

pytestmark = pytest.mark.usefixtures("ray_local")

SMALL = ("batch_size=32", "learner.learning_rate=1e-4", "generator.slots=16")


def assert_versions_agree(done: Finished) -> None:
    """The records' own tags bear out the staleness that they state, and never go back within a sequence."""
    for row in done.trained.itertuples():
        assert row.consumed_at_version[0] - min(row.policy_versions) == row.staleness
        assert (np.diff(row.policy_versions) >= 0).all()


@pytest.mark.parametrize(
    "transport",
    [
        "collective",
        pytest.param("shared_memory", marks=pytest.mark.thorough),
        pytest.param("object_store", marks=pytest.mark.thorough),
    ],
)
def test_weights_travel_while_sequences_go_on(tmp_path: Path, transport: str) -> None:
    done = run(
        tmp_path, *SMALL, "steps=12", "generator.replicas=2", "generator.ignore_eos=true",
        "generator.max_completion_length=40", f"weights.transport={transport}", "weights.audit_every=1",
        "async.on_weight_update=in_flight",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert_versions_agree(done)
    trained = done.trained
    assert len(trained) == 12 * 32
    assert set(trained.generator_id) == {"generator-0", "generator-1"}
    assert trained.staleness.max() <= 2
    assert any(len(set(versions)) > 1 for versions in trained.policy_versions)
    # Each publish was audited: float32 log-probs of learner and engine differ by rounding alone.
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in done.metrics)


def trained_data(done: Finished) -> list[tuple[Any, ...]]:
    return [
        (r.rollout_id, r.prompt, r.response, r.reward, list(r.policy_versions), list(r.consumed_at_version))
        for r in done.trained.itertuples()
    ]


@pytest.mark.thorough  # bit for bit on the local runtime in every run of the tests
def test_lag_zero_is_synchronous(tmp_path: Path) -> None:
    common = (*SMALL, "steps=4")
    sync = run(tmp_path / "sync", *common, "async.mode=sync")
    free = run(tmp_path / "async", *common, "async.mode=async", "async.max_staleness=0")
    assert trained_data(sync) == trained_data(free)
    assert {row["staleness_max"] for row in [*sync.metrics, *free.metrics]} == {0}
    # A free batch has its groups in the order in which they finished, and float sums in another order round otherwise.
    # AdamW divides a gradient by its size: where it is rounding alone, a weight moves by up to a whole learning rate.
    assert_close([row["loss"] for row in sync.metrics], [row["loss"] for row in free.metrics], atol=1e-4)


@pytest.mark.thorough  # tests/chaos has two ranks, one of which dies and comes back
def test_two_learner_ranks_train_as_one_until_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controllers, died_at = watch(monkeypatch), []

    async def kill_second(learner: RayLearner, *_: Any) -> None:
        if controllers[0].state.version == 3:
            await strike(learner.ranks[1].actor, signal.SIGKILL)
            died_at.append(time.monotonic())

    before(monkeypatch, RayLearner, "train", kill_second)
    options = (*SMALL, "async.mode=sync", "weights.audit_every=1", "max_restarts=0")
    with pytest.raises(ReplicaError, match="learner-1 died"):
        run(tmp_path / "two", *options, "steps=8", "learner.ranks=2")
    assert time.monotonic() - died_at[0] < 60, "the end took too long"
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["ledger"]["adds_up"] and summary["ledger"]["trained"] == 3 * 32

    two = Finished(tmp_path / "two", summary).metrics
    one = local_run(tmp_path / "one", *options, "steps=8").metrics
    assert len(two) == 3
    for key, tolerance in {"loss": 1e-5, "reward_mean": 0, "grad_norm": 1e-4}.items():
        assert_close(two[0][key], one[0][key], atol=tolerance)
    assert all(abs(row["mismatch_kl"]) < 1e-6 for row in two), "the published weights are not those of the ranks"


def test_fixed_lag_is_exact_and_repeatable(tmp_path: Path) -> None:
    options = (*SMALL, "steps=10", "async.mode=fixed_lag", "async.lag=4", "generator.replicas=2")
    first, second = run(tmp_path / "a", *options), run(tmp_path / "b", *options)
    assert first.untimed_metrics == second.untimed_metrics
    assert trained_data(first) == trained_data(second)
    for row in first.trained.itertuples():
        (step,) = row.consumed_at_version
        assert set(row.policy_versions) == {max(0, step - 4)}


@pytest.mark.thorough  # on the local runtime test_local_loop and the simulated schedules draw tails
def test_long_tails_keep_the_bound(tmp_path: Path) -> None:
    done = run(
        tmp_path, *FAKE, "steps=100", "generator.replicas=4", "async.max_staleness=2",
        "generator.fake.latency_median=0.02", "generator.fake.tail_probability=0.02",
        "generator.fake.latency_max_ratio=50",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert_versions_agree(done)
    assert done.trained.staleness.max() <= 2
    assert len(done.trained) == 100 * 16
    assert done.summary["ledger"]["dropped"]["stale"] > 0, "the tail was meant to be met by the bound"


def test_a_closure_of_the_python_api_is_the_reward(tmp_path: Path) -> None:
    """It travels to the reward worker's process, which cannot import it; callbacks are called in this one."""
    bonus, steps, versions = 0.25, [], []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [bonus for _ in completions]

    class Heard:
        def on_step(self, metrics: dict[str, Any]) -> None:
            steps.append((metrics["step"], metrics["reward_mean"]))

        def on_publish(self, version: int) -> None:
            versions.append(version)

    small = dict(entry.split("=", 1) for entry in (*RAY, *FAKE, "logging.wandb=disabled", "logging.progress=none"))
    small |= {"run_dir": tmp_path / "run", "steps": 2}
    done = asyncrlhf.train(reward=reward, callbacks=[Heard()], overrides=small)
    assert steps == [(1, 0.25), (2, 0.25)] and sorted(versions) == [0, 1, 2]
    assert done.summary["exit_reason"] == "done"
