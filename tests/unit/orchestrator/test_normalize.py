"""Normalised rewards against NumPy on everything seen, and what the learner, its checkpoint and its metrics get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.errors import CheckpointError
from asyncrlhf.orchestrator.learning.normalize import STATE_FILE, RewardNormalizer, RunningMoments
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.types import Payload, RolloutInfo
from tests.numeric import assert_close

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20)


@given(batches=st.lists(REWARDS, min_size=1, max_size=8))
def test_running_moments_are_those_of_everything_seen(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for number in range(len(batches)):
        moments.add(np.array(batches[number]))
        seen = np.concatenate([np.array(b) for b in batches[: number + 1]])
        assert moments.count == len(seen)
        assert_close(moments.mean, seen.mean(), atol=1e-8)
        assert_close(moments.spread, seen.std(), atol=1e-6)


def test_running_uses_this_batch_too_and_remembers() -> None:
    normalizer = RewardNormalizer(RewardConfig(normalize="running"))
    first, second = np.array([1.0, 3.0]), np.array([5.0, 7.0])
    assert_close(normalizer.normalize(first, [0, 0]), [-1, 1])
    whole = np.concatenate([first, second])
    assert_close(normalizer.normalize(second, [1, 1]), (second - whole.mean()) / whole.std())


def test_batch_and_group() -> None:
    rewards, groups = np.array([1.0, 2.0, 3.0, 10.0, 10.0, 4.0]), [5, 5, 5, 2, 2, 9]
    by_batch = RewardNormalizer(RewardConfig(normalize="batch")).normalize(rewards, groups)
    assert_close(by_batch, (rewards - rewards.mean()) / rewards.std())
    by_group = RewardNormalizer(RewardConfig(normalize="group")).normalize(rewards, groups)
    edge = (1.5) ** 0.5
    assert_close(by_group, [-edge, 0, edge, 0, 0, 0], what="no spread gives zeros, and so does a lonely sibling")


def test_the_clip_bounds_the_size() -> None:
    outlier = np.array([0.0] * 99 + [100.0])
    free = RewardNormalizer(RewardConfig(normalize="batch")).normalize(outlier, [0] * 100)
    held = RewardNormalizer(RewardConfig(normalize="batch", normalize_clip=2.0)).normalize(outlier, [0] * 100)
    assert free.max() > 9 and held.max() == 2.0 and (held[:99] == free[:99]).all()


def scored(*rewards: float, group: int = 0) -> list[RolloutInfo]:
    facts: dict[str, Any] = {"finish_reason": "stop", "generated_at": 0.0, "payload": Payload(None, 0)}
    return [RolloutInfo(i, group, "g0", 1, 1, 0, 0, reward=reward, **facts) for i, reward in enumerate(rewards)]


def test_the_statistics_of_a_checkpoint_go_on_where_they_were(tmp_path: Path) -> None:
    config = RewardConfig(normalize="running")
    normalizer, resumed = RewardNormalizer(config), RewardNormalizer(config)
    rollouts, metrics = normalizer.of_batch(scored(1, 3))
    assert [r.reward for r in rollouts] == [-1.0, 1.0]
    assert metrics == {
        "reward_mean": 2.0,
        "reward_std": 1.0,
        "normalized_reward_mean": 0.0,
        "normalized_reward_std": 1.0,
    }
    normalizer.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.of_batch(scored(5, 7)) == normalizer.of_batch(scored(5, 7))
    (tmp_path / STATE_FILE).write_text("{torn")
    with pytest.raises(CheckpointError, match="reward statistics"):
        resumed.load(tmp_path)
    (tmp_path / STATE_FILE).unlink()
    resumed.load(tmp_path)  # of a run that did not normalise


def test_groups_are_told_apart_by_what_the_controller_holds_of_a_rollout() -> None:
    normalizer = RewardNormalizer(RewardConfig(normalize="group"))
    rollouts, _ = normalizer.of_batch([*scored(1, 3, group=4), *scored(10, 30, group=2)])
    assert [r.reward for r in rollouts] == [-1.0, 1.0, -1.0, 1.0]


def test_without_normalisation_rewards_stay_and_a_checkpoint_has_no_statistics(tmp_path: Path) -> None:
    normalizer = RewardNormalizer(RewardConfig())
    assert normalizer.of_batch(scored(1, 3)) == (scored(1, 3), {})
    normalizer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
