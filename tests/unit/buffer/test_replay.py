"""The replay buffer: places, sampling, staleness policies, schedules and its saved state."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from asyncrlhf.buffer.config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.replay import ReplayBuffer, Taken
from asyncrlhf.buffer.sampling import priority
from asyncrlhf.errors import LedgerError, StaleBatchError
from asyncrlhf.types import RolloutGroup
from tests.unit.buffer.world import make_group


def make_buffer(groups: int = 2, seed: int = 0, *, flow: dict[str, Any] | None = None, **config: Any) -> ReplayBuffer:
    """``groups`` of two rollouts a step, and room for plenty unless a capacity is given."""
    config.setdefault("capacity", 100)
    return ReplayBuffer(
        BufferConfig(**config), AsyncConfig(**(flow or {})), batch_size=2 * groups, num_generations=2, seed=seed
    )


def fill(buffer: ReplayBuffer, *groups: RolloutGroup, step: int | None = None) -> None:
    for group in groups:
        buffer.reserve(len(group))
        assert buffer.add(group, step) is None


def take_ids(buffer: ReplayBuffer, version: int) -> list[int]:
    taken = buffer.take(version)
    assert taken is not None
    return [t.group.group_id for t in taken]


def test_places() -> None:
    buffer = make_buffer(capacity=6)
    buffer.reserve(4)
    assert (buffer.free, buffer.reserved, buffer.held) == (2, 4, 0)
    with pytest.raises(LedgerError, match="3 places were asked of the buffer, which has 2 of 6 free"):
        buffer.reserve(3)
    buffer.add(make_group(0))
    assert (buffer.free, buffer.reserved, buffer.held) == (2, 2, 2)
    buffer.release(1)
    with pytest.raises(LedgerError, match="only 1 are reserved"):
        buffer.add(make_group(1))
    buffer.add(make_group(1, rewards=(1.0,)))
    assert (buffer.free, buffer.reserved, buffer.held) == (3, 0, 3)
    assert take_ids(buffer, 0) == [0, 1]
    assert buffer.free == 6


@pytest.mark.parametrize("group", [RolloutGroup(1, ()), make_group(1, rewards=(0.0, 1.0, 0.5)), make_group(0)])
def test_empty_oversized_and_repeated_groups_are_refused(group: RolloutGroup) -> None:
    buffer = make_buffer()
    fill(buffer, make_group(0))
    buffer.reserve(4)
    with pytest.raises(LedgerError, match=f"group {group.group_id} with"):
        buffer.add(group)


def test_no_batch_until_there_are_enough_groups_and_one_batch_a_version() -> None:
    buffer = make_buffer()
    fill(buffer, make_group(0))
    assert buffer.take(0) is None
    fill(buffer, make_group(1), make_group(2), make_group(3))
    assert take_ids(buffer, 0) == [0, 1]
    with pytest.raises(LedgerError, match="batch of version 0 was asked for after that of version 0"):
        buffer.take(0)
    assert take_ids(buffer, 1) == [2, 3]


def test_fifo_and_lifo_follow_arrival_and_batches_are_sorted() -> None:
    for sampling, expected in (("fifo", [[1, 4], [2, 3]]), ("lifo", [[0, 2], [1, 3]])):
        buffer = make_buffer(sampling=sampling)
        fill(buffer, *(make_group(i) for i in (4, 1, 3, 2, 0)))
        assert [take_ids(buffer, v) for v in (0, 1)] == expected


def test_uniform_takes_each_group_equally_often_whatever_the_arrival_order() -> None:
    counts: Counter[int] = Counter()
    for seed in range(400):
        batches = []
        for order in ((0, 1, 2, 3, 4), (3, 0, 4, 2, 1)):
            buffer = make_buffer(seed=seed, sampling="uniform")
            fill(buffer, *(make_group(i) for i in order))
            batches.append(take_ids(buffer, 0))
        assert batches[0] == batches[1]
        counts.update(batches[0])
    # Binomial(400, 2/5): mean 160, sd 9.8.
    assert all(abs(counts[i] - 160) < 40 for i in range(5))


def test_priority_prefers_reward_spread_or_freshness() -> None:
    for config, favourite in (({"priority": "reward_spread"}, 0), ({"priority": "age"}, 1)):
        counts: Counter[int] = Counter()
        for seed in range(300):
            buffer = make_buffer(1, seed, sampling="priority", flow={"max_staleness": 5}, **config)
            fill(buffer, make_group(0, low=0, rewards=(0.0, 4.0)), make_group(1, low=5, rewards=(0.0, 0.25)))
            counts.update(take_ids(buffer, 5))
        # By spread the odds are sqrt(2.001) : sqrt(0.126), by age 1/6 : 1.
        expected = np.sqrt(2.001) / (np.sqrt(2.001) + np.sqrt(0.126)) if favourite == 0 else 6 / 7
        assert abs(counts[favourite] / 300 - expected) < 4 * np.sqrt(expected * (1 - expected) / 300)


@pytest.mark.parametrize("count", [2, 3, 4])  # with one item drawn the estimate has no variance to test by
def test_priority_weights_are_unbiased(count: int) -> None:
    """The weighted sum over the drawn items estimates the sum over all of them; exact when all are drawn."""
    rates, values, rng = [0.1, 1.0, 2.0, 0.5], np.array([3.0, -1.0, 2.0, 5.0]), np.random.default_rng(0)
    sums = np.array(
        [sum(values[i] / p for i, p in priority([0] * 4, rates, count, rng)) for _ in range(8000)],
    )
    if count == 4:
        assert np.all(sums == values.sum())
    else:
        assert abs(sums.mean() - values.sum()) < 5 * sums.std() / np.sqrt(len(sums))


def test_priority_weight_scales_the_largest_to_one() -> None:
    buffer = make_buffer(2, seed=1, sampling="priority")
    fill(buffer, *(make_group(i, rewards=(0.0, 10.0**i)) for i in range(4)))
    taken = buffer.take(0)
    assert taken is not None
    weights = {t.group.group_id: t.weight for t in taken}
    assert max(weights.values()) == 1.0
    assert weights[min(weights)] == 1.0 > weights[max(weights)]  # the likelier group counts less
    buffer = make_buffer(2, sampling="priority")
    fill(buffer, make_group(0, rewards=(0.0, 9.0)), make_group(1))
    taken = buffer.take(0)
    assert taken is not None and [t.weight for t in taken] == [1.0, 1.0]  # nothing was chosen, nothing to correct


def test_drop_evicts_over_the_bound_only() -> None:
    buffer = make_buffer(flow={"max_staleness": 2})
    fill(buffer, make_group(0, low=0, high=3), make_group(1, low=1), make_group(2, low=3))
    assert buffer.evict(2) == []
    gone = buffer.evict(3)
    assert [(e.group.group_id, e.reason, e.uses_left) for e in gone] == [(0, "stale", 1)]
    assert take_ids(buffer, 3) == [1, 2]


def test_take_leaves_what_evict_would_remove() -> None:
    buffer = make_buffer(1, flow={"max_staleness": 1})
    fill(buffer, make_group(0, low=0), make_group(1, low=4))
    assert take_ids(buffer, 4) == [1]


def test_mask_keeps_groups_with_a_fresh_token() -> None:
    buffer = make_buffer(flow={"max_staleness": 2, "over_stale": "mask"})
    fill(buffer, make_group(0, low=0, high=1), make_group(1, low=0, high=3), make_group(2, low=5))
    assert [e.group.group_id for e in buffer.evict(5)] == [0]
    taken = buffer.take(5)
    assert taken is not None
    assert [(t.group.group_id, t.masked_before_version, t.weight) for t in taken] == [(1, 3, 1.0), (2, 3, 1.0)]
    buffer.check_batch(5, taken)


def test_downweight_shrinks_with_the_staleness_over_the_bound() -> None:
    buffer = make_buffer(3, flow={"max_staleness": 1, "over_stale": "downweight"})
    fill(buffer, make_group(0, low=0), make_group(1, low=4), make_group(2, low=5))
    assert buffer.evict(5) == []
    taken = buffer.take(5)
    assert taken is not None
    assert [t.weight for t in taken] == [pytest.approx(2 / 6), 1.0, 1.0]
    buffer.check_batch(5, taken)


def test_wait_takes_the_oldest_first_whatever_the_sampling() -> None:
    buffer = make_buffer(2, sampling="lifo", flow={"max_staleness": 1, "over_stale": "wait"})
    fill(buffer, make_group(0, low=0), make_group(1, low=1), make_group(2, low=1), make_group(3, low=1))
    assert buffer.must_wait(1, [0])
    assert not buffer.must_wait(1, [1])
    assert buffer.take(1, [0]) is None
    assert take_ids(buffer, 1) == [0, 3]


def test_wait_looks_further_ahead_than_the_next_step() -> None:
    """Two stragglers of version 0 and one place a step: unless one is taken at 1, both are due at 2."""
    buffer = make_buffer(1, flow={"max_staleness": 2, "over_stale": "wait"})
    fill(buffer, make_group(3, low=1))
    assert buffer.must_wait(1, [0, 0])
    assert not buffer.must_wait(1, [0])
    assert take_ids(buffer, 1) == [3]


def test_wait_with_one_straggler_back_takes_it_before_fresher_groups() -> None:
    buffer = make_buffer(1, flow={"max_staleness": 2, "over_stale": "wait"})
    fill(buffer, make_group(3, low=1), make_group(1, low=0))
    taken = buffer.take(1, [0])
    assert taken is not None and [t.group.group_id for t in taken] == [1]


def test_reuse() -> None:
    buffer = make_buffer(1, max_reuse=2, flow={"max_staleness": 3})
    fill(buffer, make_group(0), make_group(1))
    uses = []
    for version in range(4):
        taken = buffer.take(version)
        assert taken is not None
        uses.append((taken[0].group.group_id, taken[0].uses_left))
    assert uses == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert buffer.held == 0
    fill(buffer, make_group(2, low=4))
    assert take_ids(buffer, 4) == [2]
    assert [(e.group.group_id, e.uses_left) for e in buffer.evict(8)] == [(2, 1)]


def test_zero_spread_groups_are_refused_and_their_places_freed() -> None:
    buffer = make_buffer(capacity=4, filter_zero_spread=True)
    buffer.reserve(4)
    assert buffer.add(make_group(0, rewards=(1.0, 1.0))) == "untrainable"
    assert buffer.add(make_group(1, rewards=(1.0, 0.0))) is None
    assert (buffer.held, buffer.reserved, buffer.free) == (2, 0, 2)


def test_scheduled_batches_are_the_scheduled_groups() -> None:
    buffer = make_buffer(2, filter_zero_spread=True, flow={"mode": "one_step"})
    fill(buffer, make_group(2), make_group(3), step=1)
    fill(buffer, make_group(0), step=0)
    assert buffer.take(0) is None
    buffer.close_group(1, 0)
    assert take_ids(buffer, 0) == [0]
    assert take_ids(buffer, 1) == [2, 3]
    buffer.reserve(2)
    assert buffer.add(make_group(4, low=1, rewards=(1.0, 1.0)), 2) == "untrainable"
    buffer.close_group(5, 2)
    assert buffer.take(2) == []
    with pytest.raises(LedgerError, match="group 9 came with scheduled step None"):
        buffer.add(make_group(9))


@pytest.mark.parametrize(
    ("flow", "version", "entry", "allowed"),
    [
        ({}, 3, Taken(make_group(0, low=1), 1.0, 0, 0), True),
        ({}, 3, Taken(make_group(0, low=0, high=3), 1.0, 0, 0), False),
        ({}, 3, Taken(make_group(0, low=3, high=4), 1.0, 0, 0), False),  # from the future
        ({"over_stale": "wait"}, 3, Taken(make_group(0, low=0), 1.0, 0, 0), False),
        ({"over_stale": "mask"}, 3, Taken(make_group(0, low=0, high=3), 1.0, 1, 0), True),
        ({"over_stale": "mask"}, 3, Taken(make_group(0, low=0, high=3), 1.0, 0, 0), False),
        ({"over_stale": "downweight"}, 3, Taken(make_group(0, low=0), 0.75, 0, 0), True),
        ({"over_stale": "downweight"}, 3, Taken(make_group(0, low=0), 0.8, 0, 0), False),
        ({"mode": "fixed_lag", "lag": 4}, 6, Taken(make_group(0, low=2), 1.0, 0, 0), True),
        ({"mode": "fixed_lag", "lag": 4}, 6, Taken(make_group(0, low=3), 1.0, 0, 0), False),
        ({"mode": "fixed_lag", "lag": 4}, 6, Taken(make_group(0, low=2, high=3), 1.0, 0, 0), False),
        ({"mode": "fixed_lag", "lag": 4}, 2, Taken(make_group(0, low=0), 1.0, 0, 0), True),
    ],
)
def test_check_batch(flow: dict[str, Any], version: int, entry: Taken, allowed: bool) -> None:
    buffer = make_buffer(flow=flow)
    if allowed:
        buffer.check_batch(version, [entry])
    else:
        with pytest.raises(StaleBatchError, match=f"rollout 0 .* at version {version}"):
            buffer.check_batch(version, [entry])


def test_state_survives_json_and_draws_go_on() -> None:
    config: dict[str, Any] = {"sampling": "priority", "max_reuse": 2, "flow": {"max_staleness": 8}}
    buffer = make_buffer(2, **config)
    fill(buffer, *(make_group(i, rewards=(0.0, float(i))) for i in range(8)))
    buffer.reserve(3)
    first = buffer.take(0)
    assert first is not None
    state = json.loads(json.dumps(buffer.state_dict()))
    assert "payload" not in json.dumps(state)
    payloads = {r.info.rollout_id: r.info.payload for g in buffer.groups() for r in g.rollouts}
    other = make_buffer(2, seed=99, **config)
    other.load_state_dict(state, payloads, version=1)
    assert other.groups() == buffer.groups()
    assert (other.held, other.reserved, other.free) == (buffer.held, buffer.reserved, buffer.free)
    for version in range(1, 6):
        assert other.take(version) == buffer.take(version)


def test_a_checkpoint_larger_than_the_buffer_is_refused() -> None:
    buffer = make_buffer()
    fill(buffer, make_group(0), make_group(1), make_group(2))
    payloads = {r.info.rollout_id: r.info.payload for g in buffer.groups() for r in g.rollouts}
    with pytest.raises(LedgerError, match="2 places over capacity 4"):
        make_buffer(capacity=4).load_state_dict(buffer.state_dict(), payloads, version=0)
