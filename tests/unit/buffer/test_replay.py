"""The replay buffer: places, sampling, staleness policies, schedules and its saved state."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.replay import SURPLUS, ReplayBuffer
from asyncrlhf.buffer.sampling import advantage, beyond, correction, must_wait, priority
from asyncrlhf.errors import LedgerError, StaleBatchError
from asyncrlhf.types import Payload, RolloutGroup
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
        assert buffer.add(replace(group, scheduled_step=step)) is None


def with_(group: RolloutGroup, **batch: Any) -> RolloutGroup:
    """The group as a batch holds it."""
    return replace(group, rollouts=tuple(replace(r, **batch) for r in group.rollouts))


def take_ids(buffer: ReplayBuffer, version: int) -> list[int]:
    taken = buffer.take(version)
    assert taken is not None
    return [t.group_id for t in taken]


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
    with pytest.raises(LedgerError, match="batch of version 0 was requested after that of version 0"):
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
    for sampling, favourite in (("reward_spread", 0), ("age", 1)):
        counts: Counter[int] = Counter()
        for seed in range(300):
            buffer = make_buffer(1, seed, sampling=sampling, flow={"max_staleness": 5})
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
        [sum(values[i] / p for i, p in priority(rates, count, rng)) for _ in range(8000)],
    )
    if count == 4:
        assert np.all(sums == values.sum())
    else:
        assert abs(sums.mean() - values.sum()) < 5 * sums.std() / np.sqrt(len(sums))


def test_priority_weight_scales_the_largest_to_one() -> None:
    buffer = make_buffer(2, seed=1, sampling="reward_spread")
    fill(buffer, *(make_group(i, rewards=(0.0, 10.0**i)) for i in range(4)))
    taken = buffer.take(0)
    assert taken is not None
    weights = {t.group_id: t.rollouts[0].weight for t in taken}
    assert max(weights.values()) == 1.0
    assert weights[min(weights)] == 1.0 > weights[max(weights)]  # the likelier group counts less
    buffer = make_buffer(2, sampling="reward_spread")
    fill(buffer, make_group(0, rewards=(0.0, 9.0)), make_group(1))
    taken = buffer.take(0)
    assert taken is not None and [t.rollouts[0].weight for t in taken] == [
        1.0,
        1.0,
    ]  # nothing was chosen, nothing to correct


def test_advantage_priority_is_the_papers_on_whole_groups() -> None:
    """(|A| + e)^0.5 with A normalised in the group: the scale and the offset of the rewards do not count."""
    rewards = np.array([0.0, 1.0, 1.0, 4.0])
    expected = np.sqrt(np.mean(np.abs(rewards - rewards.mean())) / rewards.std())
    assert advantage(make_group(0, rewards=tuple(rewards)), 0) == pytest.approx(expected, rel=2e-3)
    assert advantage(make_group(0, rewards=tuple(100 * rewards + 7)), 0) == pytest.approx(expected, rel=2e-3)
    assert advantage(make_group(0, rewards=(2.0, 2.0)), 0) == pytest.approx(np.sqrt(1e-3))


@pytest.mark.parametrize("exponent", [0.0, 0.4, 1.0])
def test_correction_exponent(exponent: float) -> None:
    """For one drawn of N, (N p)^-beta over its largest value in the draw: prioritised replay as 1511.05952 has it."""
    odds = np.array([0.5, 0.2, 0.05])
    reference = (4 * odds) ** -exponent
    assert correction(list(odds), exponent) == pytest.approx(list(reference / reference.max()))
    assert correction([], exponent) == []


def trained_once(**config: Any) -> ReplayBuffer:
    """Three groups a batch, of which one from replay; at version 1 groups 0 to 2 were trained, 3 to 5 wait."""
    config = {"replay_fraction": 0.5, "max_reuse": 3, "flow": {"max_staleness": 4}, **config}
    buffer = make_buffer(3, **config)
    fill(buffer, *(make_group(i, rewards=(0.0, 1.0 + i)) for i in range(3)))
    assert take_ids(buffer, 0) == [0, 1, 2]
    fill(buffer, *(make_group(i, low=1) for i in range(3, 6)))
    return buffer


def test_replay_fills_its_share_and_fresh_groups_go_oldest_first() -> None:
    buffer = trained_once(sampling="lifo")
    assert buffer.replayed_by(0) == 0 and buffer.replayed_by(1) == 1
    taken = buffer.take(1)
    assert taken is not None
    assert [(t.group_id, t.replayed, t.uses_left) for t in taken] == [(2, True, 1), (3, False, 2), (4, False, 2)]
    assert buffer.replayed_by(1) == 1
    assert buffer.take(2) is None, "one fresh group is no two"
    fill(buffer, make_group(6, low=2))
    assert take_ids(buffer, 2) == [4, 5, 6], "lifo replays the freshest that was trained"


def test_warm_up_and_want_of_replay_are_filled_with_fresh_groups() -> None:
    buffer = trained_once(warmup_steps=2)
    assert buffer.replayed_by(1) == 0
    assert take_ids(buffer, 1) == [3, 4, 5]
    fill(buffer, make_group(6, low=2), make_group(7, low=2))
    assert take_ids(buffer, 2) == [0, 6, 7]
    buffer = trained_once(max_age=1)
    fill(buffer, make_group(6, low=5), make_group(7, low=5))
    assert buffer.replayed_by(5) == 0, "all that was trained is over max_age"


def test_max_age_holds_for_what_was_trained_only() -> None:
    buffer = trained_once(max_age=2)
    assert buffer.evict_stale(2) == []
    gone = buffer.evict_stale(3)
    assert [(e.group_id, e.uses_left) for e in gone] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert [(e.group_id, e.uses_left) for e in buffer.evict_stale(6)] == [(3, 1), (4, 1), (5, 1)]


def test_replay_leaves_half_of_the_buffer_to_fresh_groups() -> None:
    buffer = make_buffer(2, capacity=8, replay_fraction=1.0, max_reuse=9, flow={"max_staleness": 9})
    fill(buffer, make_group(0), make_group(1))
    assert take_ids(buffer, 0) == [0, 1] and buffer.evict_stale(1) == []
    fill(buffer, make_group(2, low=1))
    assert take_ids(buffer, 1) == [0, 2]
    assert [(e.group_id, e.uses_left) for e in buffer.evict_stale(2)] == [(0, 0)]
    assert buffer.free == 4


def test_replayed_weights_correct_among_the_replayed_only() -> None:
    buffer = make_buffer(
        4, seed=3, replay_fraction=1.0, max_reuse=3, sampling="reward_spread", flow={"max_staleness": 4}
    )
    fill(buffer, *(make_group(i, rewards=(0.0, 4.0**i)) for i in range(4)))
    assert take_ids(buffer, 0) == [0, 1, 2, 3]
    fill(buffer, *(make_group(i, low=1) for i in range(4, 8)))
    taken = buffer.take(1)
    assert taken is not None
    fresh, again = (
        [t.rollouts[0].weight for t in taken if not t.replayed],
        [t.rollouts[0].weight for t in taken if t.replayed],
    )
    assert fresh == [1.0, 1.0]
    assert max(again) == 1.0 and min(again) < 1.0


def test_replay_draws_represent_what_may_be_replayed() -> None:
    """Weighted by 1/p, and put right for the largest being 1, the drawn groups stand for the whole pool."""
    values, sums, plain = np.array([5.0, 1.0, 1.0, 1.0]), [], []
    for seed in range(1500):
        buffer = make_buffer(
            4, seed, replay_fraction=1.0, max_reuse=2, sampling="reward_spread", flow={"max_staleness": 4}
        )
        fill(buffer, *(make_group(i, rewards=(0.0, 9.0 if i == 0 else 0.3)) for i in range(4)))
        assert take_ids(buffer, 0) == [0, 1, 2, 3]
        fill(buffer, *(make_group(i, low=1) for i in range(4, 6)))
        taken = buffer.take(1)
        assert taken is not None
        again = [t for t in taken if t.replayed]
        total = sum(t.rollouts[0].weight for t in again)
        sums.append(sum(t.rollouts[0].weight * values[t.group_id] for t in again) / total)
        plain.append(np.mean([values[t.group_id] for t in again]))
    # Self-normalised, so nearly and not exactly unbiased: the mean of the pool is 2.
    assert abs(np.mean(sums) - 2.0) < 0.35 < 0.7 < np.mean(plain) - 2.0


def test_what_replay_filled_is_saved_for_the_gate() -> None:
    buffer = trained_once()
    assert len(take_ids(buffer, 1)) == 3
    other = make_buffer(3, replay_fraction=0.5, max_reuse=3, flow={"max_staleness": 4})
    payloads = {r.rollout_id: r.payload for g in buffer.groups() for r in g.rollouts}
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())), payloads, version=2)
    assert [other.replayed_by(v) for v in (1, 2)] == [buffer.replayed_by(v) for v in (1, 2)] == [1, 2]


def test_purge_leaves_the_published_version_alone() -> None:
    buffer = trained_once()
    gone = buffer.purge(1)
    assert [(e.group_id, e.uses_left) for e in gone] == [(i, 0) for i in range(3)]
    assert [g.group_id for g in buffer.groups()] == [3, 4, 5]
    scheduled = make_buffer(2, flow={"mode": "fixed_lag", "lag": 4})
    fill(scheduled, make_group(0), step=0)
    assert scheduled.purge(3) == []


@pytest.mark.parametrize("over_stale", ["drop", "mask", "wait", "downweight"])
def test_a_smaller_bound_is_met_as_configured(over_stale: str) -> None:
    sampling = "lifo" if over_stale == "wait" else "fifo"  # which would take the newest, but for the smaller bound
    buffer = make_buffer(1, sampling=sampling, flow={"max_staleness": 4, "over_stale": over_stale})
    fill(buffer, make_group(0, low=1), make_group(1, low=1, high=3), make_group(2, low=3))
    buffer.set_bound(1)
    gone = [e.group_id for e in buffer.evict_stale(3)]
    taken = buffer.take(3)
    assert taken is not None
    buffer.check_batch(3, taken)
    first = (taken[0].group_id, taken[0].rollouts[0].weight, taken[0].rollouts[0].masked_before_version)
    expected = {
        "drop": ([0, 1], (2, 1.0, 0)),
        "mask": ([0], (1, 1.0, 2)),
        "wait": ([], (0, 1.0, 0)),
        "downweight": ([], (0, 2 / 3, 0)),
    }
    assert (gone, first) == expected[over_stale]
    buffer.set_bound(9)
    with pytest.raises(StaleBatchError):
        buffer.check_batch(9, [make_group(9, low=4)])


def test_drop_evicts_over_the_bound_only() -> None:
    buffer = make_buffer(flow={"max_staleness": 2})
    fill(buffer, make_group(0, low=0, high=3), make_group(1, low=1), make_group(2, low=3))
    assert buffer.evict_stale(2) == []
    gone = buffer.evict_stale(3)
    assert [(e.group_id, e.uses_left) for e in gone] == [(0, 1)]
    assert take_ids(buffer, 3) == [1, 2]


def test_take_leaves_what_evict_would_remove() -> None:
    buffer = make_buffer(1, flow={"max_staleness": 1})
    fill(buffer, make_group(0, low=0), make_group(1, low=4))
    assert take_ids(buffer, 4) == [1]


def test_mask_keeps_groups_with_a_fresh_token() -> None:
    buffer = make_buffer(flow={"max_staleness": 2, "over_stale": "mask"})
    fill(buffer, make_group(0, low=0, high=1), make_group(1, low=0, high=3), make_group(2, low=5))
    assert [e.group_id for e in buffer.evict_stale(5)] == [0]
    taken = buffer.take(5)
    assert taken is not None
    assert [(t.group_id, t.rollouts[0].masked_before_version, t.rollouts[0].weight) for t in taken] == [
        (1, 3, 1.0),
        (2, 3, 1.0),
    ]
    buffer.check_batch(5, taken)


def test_a_batch_whose_step_is_under_way_is_not_evicted() -> None:
    """Once taken, a group is measured by ``max_age``; the stragglers of ``mask`` come in while it is being trained."""
    flow = {"max_staleness": 2, "over_stale": "mask"}
    buffer = make_buffer(1, replay_fraction=1.0, max_reuse=3, max_age=1, flow=flow)
    fill(buffer, make_group(0, low=0, high=3))
    assert take_ids(buffer, 3) == [0] and buffer.evict_stale(3) == []
    assert [e.group_id for e in buffer.evict_stale(4)] == [0]


def test_downweight_shrinks_with_the_staleness_over_the_bound() -> None:
    buffer = make_buffer(3, flow={"max_staleness": 1, "over_stale": "downweight"})
    fill(buffer, make_group(0, low=0), make_group(1, low=4), make_group(2, low=5))
    assert buffer.evict_stale(5) == []
    taken = buffer.take(5)
    assert taken is not None
    assert [t.rollouts[0].weight for t in taken] == [pytest.approx(2 / 6), 1.0, 1.0]
    buffer.check_batch(5, taken)


def test_wait_takes_the_oldest_first_whatever_the_sampling() -> None:
    buffer = make_buffer(2, sampling="lifo", flow={"max_staleness": 1, "over_stale": "wait"})
    fill(buffer, make_group(0, low=0), make_group(1, low=1), make_group(2, low=1), make_group(3, low=1))
    assert must_wait(1, [0], bound=1, groups_per_step=2)
    assert not must_wait(1, [1], bound=1, groups_per_step=2)
    assert buffer.take(1, [0]) is None
    assert take_ids(buffer, 1) == [0, 3]


def test_wait_looks_further_ahead_than_the_next_step() -> None:
    """Two stragglers of version 0 and one place a step: unless one is taken at 1, both are due at 2."""
    buffer = make_buffer(1, flow={"max_staleness": 2, "over_stale": "wait"})
    fill(buffer, make_group(3, low=1))
    assert must_wait(1, [0, 0], bound=2, groups_per_step=1)
    assert not must_wait(1, [0], bound=2, groups_per_step=1)
    assert take_ids(buffer, 1) == [3]


def test_wait_with_one_straggler_back_takes_it_before_fresher_groups() -> None:
    buffer = make_buffer(1, flow={"max_staleness": 2, "over_stale": "wait"})
    fill(buffer, make_group(3, low=1), make_group(1, low=0))
    taken = buffer.take(1, [0])
    assert taken is not None and [t.group_id for t in taken] == [1]


def test_reuse() -> None:
    buffer = make_buffer(1, max_reuse=2, flow={"max_staleness": 3})
    fill(buffer, make_group(0), make_group(1))
    uses = []
    for version in range(4):
        taken = buffer.take(version)
        assert taken is not None
        uses.append((taken[0].group_id, taken[0].uses_left))
    assert uses == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert buffer.held == 0
    fill(buffer, make_group(2, low=4))
    assert take_ids(buffer, 4) == [2]
    assert [(e.group_id, e.uses_left) for e in buffer.evict_stale(8)] == [(2, 1)]


def test_zero_spread_groups_are_refused_and_their_places_freed() -> None:
    buffer = make_buffer(capacity=4, filter_zero_spread=True)
    buffer.reserve(4)
    assert buffer.add(make_group(0, rewards=(1.0, 1.0))) == "untrainable"
    assert buffer.add(make_group(1, rewards=(1.0, 0.0))) is None
    assert (buffer.held, buffer.reserved, buffer.free) == (2, 0, 2)


def test_a_batch_is_filled_with_groups_of_equal_rewards_after_a_bounded_surplus() -> None:
    """Where no answer earns more than another, the run would sample for ever."""
    buffer = make_buffer(1, filter_zero_spread=True)

    def dropped(first: int) -> int:
        """Groups until one is kept, which is trained."""
        for number in range(100):
            buffer.reserve(2)
            if buffer.add(make_group(first + number, rewards=(0.0, 0.0))) is None:
                return number
        raise AssertionError("100 groups were dropped for one step")

    assert dropped(0) == SURPLUS
    again = make_buffer(1, filter_zero_spread=True)
    again.load_state_dict(buffer.state_dict(), {i: Payload([], 0) for i in range(200)}, 0)
    for held in (buffer, again):
        held.reserve(2)
        assert held.add(make_group(50, rewards=(0.0, 0.0))) is None, "the surplus of this step is used up"
        assert held.take(0)
    assert dropped(60) == SURPLUS, "each step has its own"


def test_scheduled_batches_are_the_scheduled_groups() -> None:
    buffer = make_buffer(2, filter_zero_spread=True, flow={"mode": "one_step"})
    fill(buffer, make_group(2), make_group(3), step=1)
    fill(buffer, make_group(0), step=0)
    assert buffer.take(0) is None
    buffer.close_group(1, 0)
    assert take_ids(buffer, 0) == [0]
    assert take_ids(buffer, 1) == [2, 3]
    buffer.reserve(2)
    assert buffer.add(replace(make_group(4, low=1, rewards=(1.0, 1.0)), scheduled_step=2)) == "untrainable"
    buffer.close_group(5, 2)
    assert buffer.take(2) == []
    with pytest.raises(LedgerError, match="group 9 came with scheduled step None"):
        buffer.add(make_group(9))


@pytest.mark.parametrize(
    ("flow", "version", "entry", "allowed"),
    [
        ({}, 3, make_group(0, low=1), True),
        ({}, 3, make_group(0, low=0, high=3), False),
        ({}, 3, make_group(0, low=3, high=4), False),  # from the future
        ({"over_stale": "wait"}, 3, make_group(0, low=0), False),
        ({"over_stale": "mask"}, 3, with_(make_group(0, low=0, high=3), weight=1.0, masked_before_version=1), True),
        ({"over_stale": "mask"}, 3, make_group(0, low=0, high=3), False),
        ({"over_stale": "downweight"}, 3, with_(make_group(0, low=0), weight=0.75, masked_before_version=0), True),
        ({"over_stale": "downweight"}, 3, with_(make_group(0, low=0), weight=0.8, masked_before_version=0), False),
        ({"mode": "fixed_lag", "lag": 4}, 6, make_group(0, low=2), True),
        ({"mode": "fixed_lag", "lag": 4}, 6, make_group(0, low=3), False),
        ({"mode": "fixed_lag", "lag": 4}, 6, make_group(0, low=2, high=3), False),
        ({"mode": "fixed_lag", "lag": 4}, 2, make_group(0, low=0), True),
    ],
)
def test_check_batch(flow: dict[str, Any], version: int, entry: RolloutGroup, allowed: bool) -> None:
    buffer = make_buffer(flow=flow)
    if allowed:
        buffer.check_batch(version, [entry])
    else:
        with pytest.raises(StaleBatchError, match=f"rollout 0 .* at version {version}"):
            buffer.check_batch(version, [entry])


def test_state_survives_json_and_draws_go_on() -> None:
    config: dict[str, Any] = {"sampling": "reward_spread", "max_reuse": 2, "flow": {"max_staleness": 8}}
    buffer = make_buffer(2, **config)
    fill(buffer, *(make_group(i, rewards=(0.0, float(i))) for i in range(8)))
    buffer.reserve(3)
    first = buffer.take(0)
    assert first is not None
    state = json.loads(json.dumps(buffer.state_dict()))
    assert "payload" not in json.dumps(state)
    payloads = {r.rollout_id: r.payload for g in buffer.groups() for r in g.rollouts}
    other = make_buffer(2, seed=99, **config)
    other.load_state_dict(state, payloads, version=1)
    assert other.groups() == buffer.groups()
    assert (other.held, other.reserved, other.free) == (buffer.held, buffer.reserved, buffer.free)
    for version in range(1, 6):
        assert other.take(version) == buffer.take(version)


def test_a_checkpoint_larger_than_the_buffer_is_trained_before_anything_new_begins() -> None:
    buffer = make_buffer()
    fill(buffer, make_group(0), make_group(1), make_group(2))
    payloads = {r.rollout_id: r.payload for g in buffer.groups() for r in g.rollouts}
    smaller = make_buffer(capacity=4)
    smaller.load_state_dict(buffer.state_dict(), payloads, version=0)
    assert smaller.free == -2
    with pytest.raises(LedgerError, match="has -2 of 4 free"):
        smaller.reserve(1)
    assert smaller.take(0) is not None and smaller.free >= 0


def test_wait_reports_groups_over_the_bound_and_drops_none() -> None:
    buffer = make_buffer(1, flow={"max_staleness": 1, "over_stale": "wait"})
    fill(buffer, make_group(0, low=0))
    assert buffer.evict_stale(3) == []
    with pytest.raises(StaleBatchError, match=r"groups \[0\] are over it"):
        buffer.take(3)


def test_mask_keeps_a_group_as_long_as_one_sibling_is_inside_the_bound() -> None:
    buffer = make_buffer(1, flow={"max_staleness": 1, "over_stale": "mask"})
    old, fresh = make_group(0, low=0).rollouts[0], make_group(0, low=3).rollouts[1]
    fill(buffer, RolloutGroup(0, (old, fresh)))
    assert buffer.evict_stale(4) == []
    assert take_ids(buffer, 4) == [0]


def test_groups_that_no_order_of_training_keeps_inside_the_bound() -> None:
    begun = {7: 3, 8: 3, 9: 3, 6: 4}  # by id, the version that each began with
    assert beyond(5, begun, bound=2, groups_per_step=1) == {8, 9}  # 7 trains at 5, 6 at 6
    assert beyond(5, begun, bound=2, groups_per_step=3) == set()
    assert beyond(6, begun, bound=2, groups_per_step=3) == {7, 8, 9}
