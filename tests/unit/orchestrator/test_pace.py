"""How fast a replica is: the median of rollouts that end, are cancelled, or run still."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrlhf.orchestrator.pace import Pace, median_time


def slow_median(finished: list[float], cut_off: list[float]) -> float:
    """The product-limit estimate as its paper writes it: over distinct times, with risk sets counted one by one."""
    surviving = 1.0
    for t in sorted(set(finished)):
        at_risk = sum(x >= t for x in finished) + sum(x >= t for x in cut_off)
        surviving *= 1 - finished.count(t) / at_risk
        if surviving <= 0.5 + 1e-9:
            return t
    return max(finished + cut_off)


def test_median_agrees_with_the_product_limit_estimate() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        finished = rng.integers(1, 9, rng.integers(0, 12)).astype(float).tolist()
        cut_off = rng.integers(1, 9, rng.integers(0, 12)).astype(float).tolist()
        if finished or cut_off:
            assert median_time(finished, cut_off) == pytest.approx(slow_median(finished, cut_off))
    assert median_time([], []) is None


def test_a_replica_that_never_finishes_is_seen_to_be_slow_by_the_age_of_its_work() -> None:
    pace = Pace()
    for rollout_id in (1, 2, 3, 4):
        pace.begin(rollout_id, 10.0, 0)
    assert pace.estimate(13.0) == 0
    assert pace.latency == pytest.approx(3.0) and pace.finished == 0
    for rollout_id in (1, 2, 3, 4):  # one finished, three were cancelled
        pace.end(rollout_id, 14.0, finished=rollout_id == 1)
        pace.end(rollout_id, 15.0, finished=True)  # it is gone already
    assert pace.estimate(14.0) == 1 and pace.estimate(14.0) == 0
    assert pace.finished == 1 and pace.latency == pytest.approx(4.0)


def test_what_ended_long_ago_does_not_count_after_a_probe() -> None:
    pace = Pace()
    for rollout_id in range(20):
        pace.begin(rollout_id, 0.0, 0)
    for rollout_id in range(20):
        pace.end(rollout_id, 30.0, finished=True)
    pace.estimate(30.0)
    assert pace.latency == pytest.approx(30.0)
    pace.probed(0.5)
    pace.begin(99, 40.0, 2)
    pace.end(99, 40.7, finished=True)
    pace.estimate(40.7)
    assert pace.latency == pytest.approx(0.5)
    assert pace.version_lag == pytest.approx(0.4), "a fifth of the way to 2"
