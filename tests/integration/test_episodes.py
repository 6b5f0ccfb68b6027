"""Episodes through the real controller on the virtual clock: modes, bound, deaths of every part, resume, faults."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.cluster.local_runtime import LocalEpisodes, LocalGenerator, LocalLearner, LocalRuntime
from asyncrlhf.errors import LearnerLostError
from tests.integration.test_local_loop import TAIL, interrupt_after
from tests.loop import FAKE, Finished, meddle, run, train_nothing
from tests.ray_run import watch

SCORED = "reward.kind=environment"
THREE = ("episode.environment=tests.worlds:Sums", SCORED, "generator.max_completion_length=40")
SLOW = ("episode.environment=tests.worlds:SlowSums", SCORED, "generator.max_completion_length=40")
SMALL = ("batch_size=16", "num_generations=4", "learner.learning_rate=1e-4")


def assert_whole(done: Finished, turns: int = 3) -> None:
    """Every trained episode is whole: sampled and observed stretches alternate, and nothing was sampled twice."""
    done.assert_ledger_whole()
    for row in done.trained.itertuples():
        versions = np.asarray(row.policy_versions)
        sampled = versions >= 0
        stretches = int(np.count_nonzero(np.diff(np.concatenate([[False], sampled]).astype(int)) == 1))
        assert 1 <= stretches <= turns
        assert not np.asarray(row.behavior_logprobs)[~sampled].any()
        assert row.consumed_at_version[0] - versions[sampled].min() == row.staleness


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "mode",
    [
        ("generator.replicas=1",),  # in a free run, two replicas that finish at one moment are heard in another order
        ("generator.replicas=2", "async.mode=sync"),
        ("generator.replicas=2", "async.mode=fixed_lag", "async.lag=2"),
    ],
    ids=["free", "sync", "fixed_lag"],
)
@pytest.mark.more_but("free")
@pytest.mark.thorough_but("sync")
def test_one_turn_is_an_answer_bit_for_bit(tmp_path: Path, mode: tuple[str, ...]) -> None:
    options = (*SMALL, "steps=20", "checkpoint.every=20", *mode)
    plain = run(tmp_path / "plain", *options)
    one = run(tmp_path / "one", *options, "episode.environment=tests.worlds:OneSum", SCORED)
    assert plain.summary["ledger"] == one.summary["ledger"]
    assert plain.weights_digest() == one.weights_digest()
    for told, same in zip(plain.untimed_metrics, one.untimed_metrics, strict=True):
        assert told == {key: value for key, value in same.items() if key in told}
    for left, right in zip(plain.trained.itertuples(), one.trained.itertuples(), strict=True):
        assert (left.prompt, left.response, left.reward) == (right.prompt, right.response, right.reward)
        assert np.array_equal(left.behavior_logprobs, right.behavior_logprobs)
        assert np.array_equal(left.policy_versions, right.policy_versions)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "mode",
    [
        ("async.mode=sync",),
        ("async.mode=one_step",),
        ("async.mode=fixed_lag", "async.lag=2"),
        ("async.max_staleness=0",),
    ],
    ids=["sync", "one_step", "fixed_lag", "lag0"],
)
@pytest.mark.more_but("fixed_lag")
@pytest.mark.thorough_but("sync")
def test_schedules_hold_for_every_turn_and_repeat(tmp_path: Path, mode: tuple[str, ...]) -> None:
    options = (*SMALL, *SLOW, *mode, "steps=5", "generator.replicas=2")
    first = run(tmp_path / "a", *options)
    other = () if "max_staleness" in mode[0] else ("learner.virtual_step_seconds=0.9",)
    second = run(tmp_path / "b", *options, *other)
    assert_whole(first)
    assert first.untimed_metrics == second.untimed_metrics
    lag = {"async.mode=one_step": 1, "async.mode=fixed_lag": 2}.get(mode[0], 0)
    for row in first.trained.itertuples():
        (step,) = row.consumed_at_version
        assert {v for v in row.policy_versions if v >= 0} == {max(0, step - lag)}


@pytest.mark.in_turn
@pytest.mark.parametrize("update", ["drain", "interrupt", "in_flight"])
@pytest.mark.more_but("interrupt")
@pytest.mark.thorough_but("in_flight")
def test_weights_change_between_turns_and_within(tmp_path: Path, update: str) -> None:
    done = run(
        tmp_path, *SMALL, *THREE, "steps=8", "generator.slots=8", f"async.on_weight_update={update}",
        "weights.audit_every=1", "learner.virtual_step_seconds=0.03", "async.max_staleness=4",
    )  # fmt: skip
    assert_whole(done)
    within = across = False
    for row in done.trained.itertuples():
        versions = np.asarray(row.policy_versions)
        assert (np.diff(versions[versions >= 0]) >= 0).all()
        turns = [own[own >= 0] for own in np.split(versions, np.flatnonzero(np.diff(versions < 0)) + 1)]
        turns = [own for own in turns if len(own)]
        within = within or any(len(set(own)) > 1 for own in turns)
        across = across or len({own[0] for own in turns}) > 1
    assert across, "an episode outlives a version"
    assert within == (update != "drain"), "drain waits for the turn, not for the episode"


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("steps", [60, pytest.param(190, marks=pytest.mark.thorough)])
def test_the_bound_holds_over_slow_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    train_nothing(monkeypatch)
    done = run(
        tmp_path, *FAKE, *TAIL, "episode.environment=tests.worlds:TailSums", SCORED, f"steps={steps}",
        "generator.replicas=4", "async.max_staleness=2", "learner.virtual_step_seconds=0.1", "fusion.max_wait_ms=0",
        "generator.max_completion_length=40",
    )  # fmt: skip
    assert_whole(done)
    assert (done.trained.staleness <= 2).all()
    assert done.summary["ledger"]["admitted"] > 16 * steps
    assert done.summary["ledger"]["dropped"]["stale"] > 0, "the tail was meant to be met by the bound"


def kill(what: str, *times: float) -> Any:
    """Kill the first part of a kind at these times of the virtual clock."""

    def action(runtime: LocalRuntime) -> None:
        def strike() -> None:
            victim: Any = {
                "generator": runtime.generators, "episodes": runtime.episodes, "learner": [runtime.learner],
            }[what][0]  # fmt: skip
            assert isinstance(victim, LocalGenerator | LocalEpisodes | LocalLearner)
            victim.kill()

        for moment in times:
            asyncio.get_running_loop().call_later(moment, strike)

    return action


@pytest.mark.in_turn
@pytest.mark.parametrize("what", ["generator", "episodes", "learner"])
@pytest.mark.parametrize("mode", [(), ("async.mode=fixed_lag", "async.lag=2")], ids=["free", "scheduled"])
@pytest.mark.more_but("free-episodes", "scheduled-generator")
@pytest.mark.thorough_but("free-learner")
def test_a_dead_part_loses_nothing_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, mode: tuple[str, ...]
) -> None:
    meddle(monkeypatch, kill(what, 0.72, 2.13, 3.31))
    done = run(
        tmp_path, *FAKE, *SLOW, *mode, "steps=30", "generator.replicas=2", "episode.workers=2",
        "learner.virtual_step_seconds=0.2", "checkpoint.every=5",
    )  # fmt: skip
    assert_whole(done)
    assert done.summary["ledger"]["trained"] == 30 * 16
    assert [row["step"] for row in done.metrics] == list(range(1, 31))


def test_an_interrupted_run_begins_its_episodes_anew(tmp_path: Path) -> None:
    options = (*FAKE, *SLOW, "generator.replicas=2", "steps=20", "checkpoint.resume=auto", "async.max_staleness=3")
    interrupt_after(tmp_path, 7, *options)
    done = run(tmp_path, *options)
    assert_whole(done)
    assert [row["step"] for row in done.metrics] == list(range(1, 21))
    assert sum(map(len, done.trained.consumed_at_version)) == 20 * 16


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("world", "cause"),
    [
        ("Raises", "The environment failed: RuntimeError: the world has ended"),
        ("Hangs", "step took longer than episode.timeout_seconds=2"),
        ("NoText", ""),
        ("Floods", ""),
        ("BadReward", "The environment's reward is nan"),
        ("RaisesAtReset", "The environment failed: KeyError"),
    ],
)
@pytest.mark.more_but("Raises-", "Hangs")
@pytest.mark.thorough_but(every=3)
def test_a_faulty_world_costs_single_episodes(tmp_path: Path, world: str, cause: str) -> None:
    done = run(
        tmp_path, *FAKE, f"episode.environment=tests.worlds:{world}", SCORED, "steps=8", "episode.timeout_seconds=2",
        "generator.max_completion_length=40", "max_failure_fraction=1",
    )  # fmt: skip
    assert_whole(done)
    failed = done.summary["ledger"]["failed"]
    assert (cause == "") == (not failed)
    assert all(cause in said for said in failed)
    assert len(done.metrics) == 8


def test_an_episode_cut_off_in_its_first_turn_scores_nothing_and_trains(tmp_path: Path) -> None:
    """The environment has not seen the turn, and gives no reward."""
    done = run(
        tmp_path, *FAKE, "episode.environment=tests.worlds:OneSum", SCORED, "steps=2",
        "generator.max_completion_length=2", "generator.fake.correct_probability=0",
    )  # fmt: skip
    assert_whole(done)
    assert done.summary["ledger"]["trained"] == 2 * 16 and (done.trained.reward == 0).any()
    assert done.summary["heldout_accuracy"]["after"] == 0


def test_the_environment_that_is_waited_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controllers, said = watch(monkeypatch), list[str]()

    def look() -> None:
        said.extend(controllers[0].supervisor.sentences())

    meddle(monkeypatch, lambda runtime: asyncio.get_running_loop().call_later(28.0, look) and None)
    run(
        tmp_path, *FAKE, "episode.environment=tests.worlds:Hangs", SCORED, "steps=2", "episode.timeout_seconds=20",
        "generator.max_completion_length=40", "max_failure_fraction=1", "eval_every=0", "task.heldout_size=1",
    )  # fmt: skip
    (sentence,) = [sentence for sentence in said if "environment" in sentence]
    assert re.fullmatch(
        r"\d+ episodes wait for episode\.environment=tests\.worlds:Hangs \(ids \d+[\d, .]*\), the longest, \d+ at "
        r"episode-0 for [78] s\.",
        sentence,
    ), sentence


def test_waiting_for_a_slot_makes_no_episode_late(tmp_path: Path) -> None:
    """There is one slot for each two episodes, and turns are slow; the environments themselves take no time."""
    slow = (*FAKE, *THREE, "generator.slots=8", "steps=6", "episode.concurrency=16", "generator.fake.latency_median=2")
    limited, free = run(tmp_path / "a", *slow, "episode.episode_seconds=1"), run(tmp_path / "b", *slow)
    assert_whole(limited)
    assert limited.trained.response.tolist() == free.trained.response.tolist()
    assert not limited.summary["ledger"]["failed"]


def test_an_environment_that_takes_too_long_in_all_ends_its_episode_truncated(tmp_path: Path) -> None:
    """A step takes a second: the second one is not finished within the limit."""
    done = run(tmp_path, *FAKE, *SLOW, "steps=6", "episode.episode_seconds=1.5")
    assert_whole(done)
    ends = Counter(int(np.count_nonzero(np.diff(np.asarray(v) >= 0))) for v in done.trained.policy_versions)
    assert set(ends) <= {0, 2} and ends[2] > 50, "one turn has been answered, and the second one waited for it"
    assert not done.summary["ledger"]["failed"]


@pytest.mark.thorough
def test_the_learner_is_busy_while_tools_take_ten_times_the_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_nothing(monkeypatch)
    done = run(
        tmp_path, *FAKE, *SLOW, "steps=120", "generator.slots=256", "episode.concurrency=256",
        "generator.fake.latency_median=0.1", "async.max_staleness=24", "buffer.capacity=512",
        "learner.virtual_step_seconds=0.3", "fusion.max_wait_ms=0",
    )  # fmt: skip
    assert_whole(done)
    begun, ended = done.metrics[19]["wall_time"], done.metrics[-1]["wall_time"]
    assert 100 * 0.3 / (ended - begun) >= 0.9


@pytest.mark.in_turn
@pytest.mark.more
def test_slots_are_not_idle_while_environments_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_nothing(monkeypatch)

    def rate(world: str) -> float:
        rows = run(
            tmp_path / world, *FAKE, f"episode.environment=tests.worlds:{world}", SCORED, "batch_size=32", "steps=40",
            "generator.slots=32", "generator.fake.latency_median=0.1", "async.max_staleness=8", "buffer.capacity=512",
            "learner.virtual_step_seconds=0.001", "fusion.max_wait_ms=0",
        ).metrics  # fmt: skip
        return 20 / (rows[-1]["wall_time"] - rows[19]["wall_time"])

    assert rate("SlowStart") >= 0.9 * rate("OneSum")


@pytest.mark.parametrize("turns", [(), SLOW], ids=["answers", "episodes"])
def test_an_evaluation_does_not_wait_for_a_replica_that_waits_for_a_dead_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: tuple[str, ...]
) -> None:
    """Both die in the first evaluation: the run ends at once, and names the learner."""

    def both(runtime: LocalRuntime) -> None:
        for what in ("learner", "generator"):
            kill(what, 0.3)(runtime)

    meddle(monkeypatch, both)
    with pytest.raises(LearnerLostError, match="learner-0 died"):
        run(tmp_path, *FAKE, *turns, "steps=5", "generator.fake.latency_median=2")
