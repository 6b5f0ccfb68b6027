"""The fake engine's clock, distributions and answers."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrlhf.engines.fake import FakeEngine
from asyncrlhf.engines.generator_config import FakeConfig
from asyncrlhf.types import GenerationFailure, GenerationRequest, Prompt, Rollout, SamplingParams

STOP = 3


def make_requests(count: int, longest: int = 400, stops: tuple[int, ...] = (STOP,)) -> list[GenerationRequest]:
    sampling = SamplingParams(longest, stop_token_ids=stops)
    return [GenerationRequest(i, i, Prompt("", "", np.array([5])), 1000 + i, sampling) for i in range(count)]


def make_engine(slots: int = 1, **settings: float) -> FakeEngine:
    return FakeEngine(FakeConfig(**settings), slots=slots, vocab_size=12)


def run(engine: FakeEngine) -> dict[int, tuple[float, Rollout | GenerationFailure]]:
    """Step at each ``wake_at``; the time at which each request came back."""
    return run_from(engine, 0.0)


def run_from(engine: FakeEngine, now: float) -> dict[int, tuple[float, Rollout | GenerationFailure]]:
    done = {}
    while engine.in_flight():
        output = engine.step(now)
        done.update({result.rollout_id: (now, result) for result in output.finished})
        if output.wake_at is not None:
            assert output.wake_at >= now
            now = output.wake_at
    return done


def test_latency_is_a_capped_log_normal() -> None:
    engine = make_engine(1000, latency_median=2.0, latency_sigma=1.0, latency_max_ratio=8.0)
    engine.submit(make_requests(1000))
    times = np.array([time for time, _ in run(engine).values()])
    assert np.median(times) == pytest.approx(2.0, rel=0.15)
    assert times.max() == pytest.approx(16.0, abs=1e-3)
    assert np.log(times[times < 15]).std() == pytest.approx(0.96, abs=0.08)


def test_the_tail_takes_the_cap_itself() -> None:
    engine = make_engine(2000, latency_median=1.0, latency_sigma=0.0, tail_probability=0.1, latency_max_ratio=50.0)
    engine.submit(make_requests(2000))
    times = np.array([time for time, _ in run(engine).values()])
    assert set(np.round(times, 3)) == {1.0, 50.0}
    assert (times > 2).mean() == pytest.approx(0.1, abs=0.025)


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    engine = make_engine(3000, length_mean=20.0, length_sigma=0.6, latency_median=0.0)
    engine.submit(make_requests(3000))
    results = [result for _, result in run(engine).values()]
    assert np.mean([len(result.response_ids) for result in results]) == pytest.approx(20.0, rel=0.05)
    assert all(result.finish_reason == "stop" and result.response_ids[-1] == STOP for result in results)
    seen = np.unique(np.concatenate([result.response_ids[:-1] for result in results]))
    assert seen.tolist() == [token for token in range(12) if token != STOP]


def test_a_queue_moves_at_the_rate_of_the_slots_whatever_the_step_times() -> None:
    engine = make_engine(2, latency_median=1.0, latency_sigma=0.0)
    engine.submit(make_requests(10))
    engine.step(0.0)
    assert len(engine.step(4.5).finished) == 8
    assert len(engine.step(5.0).finished) == 2


def test_tokens_are_made_evenly_and_stamped_when_they_are_made() -> None:
    engine = make_engine(1, latency_median=10.0, latency_sigma=0.0, length_mean=10.0, length_sigma=0.0)
    engine.submit(make_requests(1))
    engine.step(0.0)
    assert engine.step(3.05).tokens == 3
    engine.load_weights(1, {}, "keep")
    assert engine.step(7.05).tokens == 4
    engine.load_weights(2, {}, "recompute")
    assert engine.step(9.0).finished == []
    [result] = engine.step(10.0).finished
    assert result.policy_versions.tolist() == [0] * 3 + [1] * 4 + [2] * 3


def test_weights_that_come_when_a_response_ends_leave_the_others_tokens_of_before_to_the_old_version() -> None:
    engine = make_engine(2, latency_median=1.0, latency_sigma=0.7, length_mean=100.0, length_sigma=0.0)
    engine.submit(make_requests(2))
    first = engine.step(0.0).wake_at
    assert first is not None and len(engine.step(first).finished) == 1  # such a step counts its own tokens alone
    engine.load_weights(1, {}, "keep")
    ((last, rollout),) = run_from(engine, first).values()
    assert isinstance(rollout, Rollout)
    old = np.count_nonzero(rollout.policy_versions == 0)
    assert old == pytest.approx(len(rollout.response_ids) * first / last, abs=1) and old > 10


def test_a_sleep_freezes_the_clock() -> None:
    engine = make_engine(1, latency_median=2.0, latency_sigma=0.0)
    engine.submit(make_requests(1))
    engine.step(0.0)
    engine.step(1.0)
    engine.sleep()
    assert engine.step(50.0).finished == []
    engine.wake()
    output = engine.step(100.0)
    assert output.finished == [] and output.wake_at == pytest.approx(101.0)
    assert len(engine.step(101.0).finished) == 1


def test_reference_answers_are_written_as_often_as_asked() -> None:
    answer = np.array([7, 8, 7])
    engine = FakeEngine(
        FakeConfig(correct_probability=0.3, length_mean=9.0, length_sigma=0.0, latency_median=0.0),
        slots=10,
        vocab_size=12,
        answer_ids=lambda request: None if request.rollout_id % 2 else answer,
    )
    engine.submit(make_requests(4000))
    results = [result for _, result in run(engine).values()]
    right = np.array([result.response_ids.tolist() == [7, 8, 7, STOP] for result in results])
    even = np.array([result.rollout_id % 2 == 0 for result in results])
    assert right[even].mean() == pytest.approx(0.3, abs=0.04)
    assert not right[~even].any()


def test_a_long_response_is_cut_without_its_stop_token() -> None:
    engine = make_engine(1, length_mean=30.0, length_sigma=0.0)
    engine.submit(make_requests(1, longest=5))
    [(_, result)] = run(engine).values()
    assert len(result.response_ids) == 5 and result.finish_reason == "length" and STOP not in result.response_ids


def test_failures_come_back_as_failures() -> None:
    engine = make_engine(5, failure_probability=0.25)
    engine.submit(make_requests(1000))
    failed = [isinstance(result, GenerationFailure) for _, result in run(engine).values()]
    assert len(failed) == 1000 and np.mean(failed) == pytest.approx(0.25, abs=0.05)


def test_wall_clock_times_of_today_do_not_stall_it() -> None:
    engine = make_engine(3, latency_median=0.001)
    engine.submit(make_requests(200))
    now = 1.75e9 + 0.123
    for _ in range(1000):
        output = engine.step(now)
        if not engine.in_flight():
            return
        now = output.wake_at or now
    raise AssertionError("it did not finish")
