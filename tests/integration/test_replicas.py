"""Replicas of different speed and kind on the virtual clock: nobody waits for the slow one, and nobody starves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalRuntime
from asyncrlhf.orchestrator.replicas.pacing import Pacing
from asyncrlhf.orchestrator.state import Replica
from tests.loop import FAKE, Finished, meddle, run, train_nothing

GENERATION_BOUND = (*FAKE, "batch_size=32", "fusion.max_wait_ms=0", "learner.virtual_step_seconds=0.01")
FAST_LATENCY = 0.05


def with_slow(times: float, fast: int = 2) -> str:
    return f"generator.groups={{fast:{{replicas:{fast}}},slow:{{fake:{{latency_median:{FAST_LATENCY * times}}}}}}}"


def speed(done: Finished) -> float:
    """Steps a second once the run is under way."""
    rows = done.metrics[4:-3]
    return float((rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["wall_time"] - rows[0]["wall_time"]))


def share_of(done: Finished, name: str, since: int = 0) -> float:
    late = done.trained[done.trained.consumed_at_version.str[0] >= since]
    return float((late.generator_id == name).mean())


@pytest.mark.in_turn
@pytest.mark.parametrize("over_stale", ["drop", pytest.param("wait", marks=pytest.mark.thorough)])
@pytest.mark.more
def test_a_replica_30_times_slower_costs_the_fast_ones_nothing(tmp_path: Path, over_stale: str) -> None:
    common = (*GENERATION_BOUND, "steps=40", f"async.over_stale={over_stale}")
    two = run(tmp_path / "two", *common, "generator.replicas=2")
    three = run(tmp_path / "three", *common, with_slow(30))
    assert speed(three) >= 0.9 * speed(two)
    for done in (two, three):
        done.assert_ledger_whole()
        assert done.trained.staleness.max() <= 2
    slow = three.summary["generators"]["generator-slow-0"]
    assert slow["held_back_fraction"] > 0.5 and slow["latency"] > 2 * FAST_LATENCY
    assert three.summary["generators"]["generator-fast-0"]["held_back_fraction"] == 0
    assert sum(row["generators_held_back"] for row in three.metrics) > 20
    trained = (three.trained.generator_id == "generator-slow-0").sum()
    assert trained <= 20, "what the slow one makes is over the bound, but for the rollouts that were waited for"


@pytest.mark.in_turn
@pytest.mark.more
def test_without_pacing_a_wait_for_the_slow_one_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: the same run, when nobody judges the replicas, is far slower."""
    monkeypatch.setattr(Pacing, "_judge", lambda *_: None)
    common = (*GENERATION_BOUND, "steps=16", "async.over_stale=wait")
    two = run(tmp_path / "two", *common, "generator.replicas=2")
    three = run(tmp_path / "three", *common, with_slow(30))
    assert speed(three) < 0.5 * speed(two)


def test_a_replica_that_runs_empty_has_no_other_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand replicas of one group each run empty all the time; a look at all for each would be their square."""
    train_nothing(monkeypatch)
    judged, original = [0], Pacing._judge

    def counted(self: Pacing, replica: Replica, reference: float | None) -> None:
        judged[0] += 1
        original(self, replica, reference)

    monkeypatch.setattr(Pacing, "_judge", counted)
    small = ("generator.replicas=16", "generator.slots=4", "steps=20", "async.max_staleness=4", "eval_every=0")
    done = run(tmp_path, *GENERATION_BOUND, *small, "generator.fake.latency_median=0.05")
    assert judged[0] <= 4 * done.summary["ledger"]["admitted"]


@pytest.mark.in_turn
@pytest.mark.more
def test_a_slow_replica_that_can_finish_in_time_has_its_share(tmp_path: Path) -> None:
    """Eight replicas, one three times slower; the learner takes longer for a step than the slow one for a rollout."""
    done = run(
        tmp_path, *FAKE, "steps=30", "batch_size=64", "generator.slots=8", "fusion.max_wait_ms=0", with_slow(3, fast=7),
        "learner.virtual_step_seconds=0.4",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert share_of(done, "generator-slow-0") > 0.05
    assert done.summary["generators"]["generator-slow-0"]["held_back_fraction"] == 0
    assert done.trained.staleness.max() <= 2


@pytest.mark.thorough
def test_a_replica_that_recovers_gets_work_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(runtime: LocalRuntime) -> None:
        def strike() -> None:
            patient = runtime.generators[2]
            assert isinstance(patient, LocalGenerator)
            engine = patient.worker.engine
            engine._config = replace(engine._config, latency_median=FAST_LATENCY)  # type: ignore[attr-defined]

        asyncio.get_running_loop().call_later(2.5, strike)

    meddle(monkeypatch, heal)
    done = run(tmp_path, *GENERATION_BOUND, "steps=80", with_slow(8))
    done.assert_ledger_whole()
    held = [row["generator/generator-slow-0/held_back"] for row in done.metrics]
    assert any(held[:30]) and not any(held[-5:])
    assert share_of(done, "generator-slow-0", since=70) > 0.15
    assert done.trained.staleness.max() <= 2


def test_engines_of_different_kinds_work_in_one_run(tmp_path: Path) -> None:
    done = run(
        tmp_path, "steps=6", "batch_size=32", "num_generations=4", "learner.learning_rate=1e-4",
        "generator.groups={real:{engine:hf,slots:16},made_up:{engine:fake,slots:16}}",
    )  # fmt: skip
    done.assert_ledger_whole()
    assert set(done.trained.generator_id) == {"generator-real-0", "generator-made_up-0"}
    real = done.trained[done.trained.generator_id == "generator-real-0"]
    assert (real.behavior_logprobs.str[0] < 0).all(), "tokens of the real engine carry its own log-probs"
