"""Advantages agree with the papers' formulas on ragged groups and on packed sequences with holes in the mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.algorithms import advantages
from asyncrlhf.algorithms.masked import moments, whiten
from tests import reference
from tests.unit.algorithms.batches import ragged_batch

SEEDS = st.integers(0, 2**32 - 1)


def _ragged_groups(seed: int, smallest: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards [N] and group ids [N]: shuffled, of unequal sizes, with ids far apart."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(smallest, 6, size=rng.integers(1, 6))
    group_ids = rng.permutation(np.repeat(rng.choice(10_000, size=len(sizes), replace=False), sizes))
    return rng.standard_normal(len(group_ids)) * 3 + 1, group_ids


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_group_advantages_against_the_papers(seed: int) -> None:
    rewards, group_ids = _ragged_groups(seed, smallest=2)
    tensors = torch.from_numpy(rewards), torch.from_numpy(group_ids)
    found = {
        "loo": advantages.loo(*tensors),
        "norm": advantages.group_norm(*tensors, eps=1e-4),
        "mean": advantages.group_mean(*tensors, shift=-0.1),
    }
    for group in np.unique(group_ids):
        members = group_ids == group
        expected = {
            "loo": reference.loo_advantages(rewards[members]),
            "norm": reference.grpo_advantages(rewards[members], 1e-4),
            "mean": rewards[members] - (rewards[members].mean() - 0.1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(found[name].numpy()[members], values, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(advantages.raw(*tensors).numpy(), rewards)


def test_a_group_of_one() -> None:
    rewards, group_ids = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([7, 7, 3])
    assert advantages.group_mean(rewards, group_ids, shift=-0.1)[2] == 0
    assert advantages.group_norm(rewards, group_ids)[2] == 0
    with pytest.raises(ValueError, match="group 3 has one"):
        advantages.loo(rewards, group_ids)


def test_a_group_without_spread_gives_exactly_zero() -> None:
    rewards, group_ids = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    for advantage in (advantages.loo, advantages.group_mean, advantages.group_norm):
        assert not advantage(rewards, group_ids).any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_skips_masked_tokens(seed: int, gamma: float, lam: float) -> None:
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    found, returns = advantages.gae(
        torch.from_numpy(batch.token_advantages), torch.from_numpy(batch.theta), mask, ids, gamma=gamma, lam=lam
    )
    pairs = [
        reference.gae(r, v, gamma, lam)
        for r, v in zip(batch.split(batch.token_advantages), batch.split(batch.theta), strict=True)
    ]
    np.testing.assert_allclose(found.numpy()[batch.mask], np.concatenate([a for a, _ in pairs]), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        returns.numpy()[batch.mask], np.concatenate([r for _, r in pairs]), rtol=1e-10, atol=1e-12
    )
    assert not found.numpy()[~batch.mask].any() and not returns.numpy()[~batch.mask].any()


def test_gae_of_nothing_is_nothing() -> None:
    values, mask, ids = torch.tensor([1.0, float("nan")]), torch.tensor([False, False]), torch.tensor([0, 1])
    found, returns = advantages.gae(values, values, mask, ids)
    assert not found.any() and not returns.any()


def test_terminal_rewards_lie_on_the_last_masked_token() -> None:
    mask = torch.tensor([False, True, True, False, False, False, True])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    found = advantages.terminal_rewards(torch.tensor([1.5, 9.0, -2.0]), mask, ids)
    assert found.tolist() == [0, 0, 1.5, 0, 0, 0, -2.0]
    assert advantages.broadcast(torch.tensor([1.0, 2.0, 3.0]), ids).tolist() == [1, 1, 1, 1, 2, 2, 3]


def test_whitening_over_ranks_is_whitening_of_the_whole() -> None:
    batch = ragged_batch(8)
    mask, _ = batch.tensors()
    x = torch.from_numpy(batch.token_advantages)
    kept = batch.token_advantages[batch.mask]
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(x, mask).numpy()[batch.mask], expected, rtol=1e-10)
    total = moments(x[:4], mask[:4]) + moments(x[4:], mask[4:])
    parts = torch.cat((whiten(x[:4], mask[:4], total), whiten(x[4:], mask[4:], total)))
    np.testing.assert_allclose(parts.numpy(), whiten(x, mask).numpy(), rtol=1e-12)
    assert not whiten(x, torch.zeros_like(mask)).any()
    assert not whiten(torch.ones(3), torch.tensor([True, False, False])).any()
