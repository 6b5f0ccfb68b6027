"""Advantages agree with the papers' formulas on ragged groups and on packed sequences with holes in the mask."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.algorithms import advantages
from asyncrlhf.algorithms.logprobs import collision_probability, token_logprobs
from asyncrlhf.algorithms.masked import moments, whiten
from tests import reference
from tests.numeric import assert_close
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
            assert_close(found[name].numpy()[members], values)
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
    assert_close(found.numpy()[batch.mask], np.concatenate([a for a, _ in pairs]))
    assert_close(returns.numpy()[batch.mask], np.concatenate([r for _, r in pairs]))
    assert not found.numpy()[~batch.mask].any() and not returns.numpy()[~batch.mask].any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95]))
def test_vtrace_against_the_paper(seed: int, gamma: float, lam: float) -> None:
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    rewards, values, drift = (torch.from_numpy(x) for x in (batch.token_advantages, batch.values, batch.prox))
    drift = drift - torch.from_numpy(batch.mu)
    found = advantages.vtrace(rewards, values, drift, mask, ids, gamma=gamma, lam=lam, rho_bar=1.3, c_bar=1.1)
    parts = (batch.token_advantages, batch.values, np.exp(drift.numpy()))
    pairs = [reference.vtrace(*x, gamma, lam, (1.3, 1.1)) for x in zip(*map(batch.split, parts), strict=True)]
    for ours, theirs in zip(found, zip(*pairs, strict=True), strict=True):
        assert_close(ours.numpy()[batch.mask], np.concatenate(theirs))
        assert not ours.numpy()[~batch.mask].any()

    # On policy, with lambda 1, it is GAE with lambda 1.
    still = advantages.vtrace(rewards, values, torch.zeros_like(drift), mask, ids, gamma=gamma, lam=1.0)
    for ours, theirs in zip(still, advantages.gae(rewards, values, mask, ids, gamma=gamma, lam=1.0), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_gae_of_stale_tokens_has_the_targets_of_vtrace_and_its_own_advantages(lam: float) -> None:
    batch = ragged_batch(3)
    mask, ids = batch.tensors()
    rewards, values, drift = (torch.from_numpy(x) for x in (batch.token_advantages, batch.values, batch.prox))
    given = {"log_ratio": drift - torch.from_numpy(batch.mu), "rho_bar": 1.3, "c_bar": 1.1, "gamma": 0.9, "lam": lam}
    advantage, targets = advantages.gae(rewards, values, mask, ids, **given)
    _, theirs = advantages.vtrace(rewards, values, loss_mask=mask, sequence_ids=ids, **given)
    assert_close(targets, theirs)
    parts = (batch.split(x.numpy()) for x in (advantage, rewards, values, theirs))
    for a, r, v, target in zip(*parts, strict=True):
        later, gap = np.append(v[1:], 0.0), np.append((target - v)[1:], 0.0)
        assert_close(a, r + 0.9 * later - v + 0.9 * lam * gap)


def test_without_a_critic_vtrace_forgets_the_reward() -> None:
    """With V = 0 and a terminal reward, A_0 is the product of min(1, r): near 0 after 200 tokens of sd 0.1."""
    drift = 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    rewards, mask = torch.zeros(200).double(), torch.ones(200, dtype=torch.bool)
    rewards[-1] = 1.0
    found, _ = advantages.vtrace(rewards, torch.zeros_like(rewards), drift, mask, torch.zeros(200).long())
    assert_close(float(found[0]), float(drift.clamp(max=0).sum().exp()))
    assert 0 < float(found[0]) < 0.005


def test_token_advantages_of_nothing_are_nothing() -> None:
    for size in (0, 2):
        x, mask, ids = torch.full((size,), float("nan")), torch.zeros(size, dtype=torch.bool), torch.arange(size)
        for results in (advantages.gae(x, x, mask, ids), advantages.vtrace(x, x, x, mask, ids)):
            assert all(len(r) == size and not r.any() for r in results)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_baselines_of_optimal_value_and_of_least_variance(seed: int) -> None:
    rewards, group_ids = _ragged_groups(seed, smallest=1)
    rng = np.random.default_rng(seed)
    logs, norms = rng.standard_normal((2, len(rewards)))
    norms = np.abs(norms)
    tensors = torch.from_numpy(rewards), torch.from_numpy(group_ids)
    optimal = advantages.vstar(*tensors, beta=0.7).numpy()
    weighted = advantages.opob(*tensors, log_weights=torch.from_numpy(logs), score_norms=torch.from_numpy(norms))
    for group in np.unique(group_ids):
        m = group_ids == group
        r = rewards[m]
        assert_close(optimal[m], r - 0.7 * np.log(np.mean(np.exp(r / 0.7))))
        baseline = reference.opob_baseline(r, np.exp(logs[m]), norms[m])
        assert_close(weighted.numpy()[m], r - baseline)

        def second_moment(b: float, m: np.ndarray = m, r: np.ndarray = r) -> float:
            return float(np.sum((np.exp(logs[m]) * (r - b)) ** 2 * norms[m]))

        assert second_moment(baseline) <= min(second_moment(baseline - 0.01), second_moment(baseline + 0.01))


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_maxrl_climbs_the_first_terms_of_the_log_likelihood(chance: float, size: int) -> None:
    """Over every outcome of a group of one Bernoulli policy: the gradient of -sum_k (1 - p)^k / k, k < G, which goes to
    that of log p, and for G = 2 is the plain policy gradient's."""
    given = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        rewards = np.array(outcome)
        found = advantages.mean_norm(torch.from_numpy(rewards), torch.zeros(size, dtype=torch.int64)).numpy()
        scores = np.where(rewards == 1, 1 / chance, -1 / (1 - chance))  # of log p and of log(1 - p), in p
        given += float(np.prod(np.where(rewards == 1, chance, 1 - chance)) * np.mean(found * scores))
    assert_close(given, sum((1 - chance) ** (k - 1) for k in range(1, size)))


def test_maxrl_of_groups_that_earned_nothing_or_less() -> None:
    rewards, group_ids = torch.tensor([0.0, 0.0, -3.0, 1.0, 7.0]), torch.tensor([0, 0, 1, 1, 2])
    assert advantages.mean_norm(rewards, group_ids).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]


def test_extreme_weights_and_rewards() -> None:
    rewards, group_ids = torch.tensor([1.0, 3.0, 500.0], dtype=torch.float64), torch.tensor([0, 0, 9])
    found = advantages.opob(
        rewards, group_ids, log_weights=torch.tensor([900.0, -900.0, 0.0]), score_norms=torch.ones(3)
    )
    assert_close(found, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    still = advantages.opob(rewards, group_ids, log_weights=torch.zeros(3), score_norms=torch.zeros(3))
    assert_close(still, torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64))
    sharp = advantages.vstar(rewards, group_ids, beta=1e-3)
    # The larger reward less beta log 2: of two, the other adds nothing to the mean of the exponentials.
    half = 1e-3 * np.log(2)
    assert_close(sharp, torch.tensor([half - 2.0, half, 0.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="beta"):
        advantages.vstar(rewards, group_ids, beta=0.0)


def saturated(seed: int, size: int, gap: tuple[float, float]) -> tuple[torch.Tensor, ...]:
    """(logits [T, V] float32, targets [T], ids [T], rewards [size], group of each) whose targets are ``gap`` above."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(size), rng.integers(1, 9, size))
    logits = rng.normal(0, 2, (len(ids), 50))
    targets = rng.integers(50, size=len(ids))
    logits[np.arange(len(ids)), targets] = logits.max(1) + rng.uniform(*gap, len(ids))
    arrays = logits.astype(np.float32), targets, ids, rng.integers(0, 2, size).astype(np.float32), np.arange(size) // 4
    return tuple(torch.from_numpy(x) for x in arrays)


def opob_of(logits: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, *grouped: torch.Tensor) -> torch.Tensor:
    mask, size = torch.ones(len(ids), dtype=torch.bool), len(grouped[0])
    norms = advantages.score_norms(token_logprobs(logits, targets)[0], collision_probability(logits), mask, ids, size)
    assert (norms >= 0).all()
    return advantages.opob(*grouped, log_weights=torch.zeros(size), score_norms=norms)


def test_a_saturated_policy_has_advantages_within_the_spread_of_its_rewards() -> None:
    """pi is 1 - 1e-8 and nearer: in float32 1 - 2 pi + sum pi^2 is rounding alone, of either sign."""
    for seed in range(300):
        case = saturated(seed, 8, (18.0, 30.0))
        found = opob_of(*case)
        *_, rewards, group_ids = case
        for group in range(2):
            m = group_ids == group
            assert torch.isfinite(found[m]).all()
            assert float(found[m].abs().max()) <= float(rewards[m].max() - rewards[m].min()) + 1e-6, seed
            torch.testing.assert_close(found[m], rewards[m] - rewards[m].mean(), msg="the group's mean is the baseline")


def test_a_nearly_saturated_policy_has_the_advantages_of_double_precision() -> None:
    for seed in range(50):
        logits, *rest = saturated(seed, 8, (0.0, 9.0))
        exact = opob_of(logits.double(), *rest)
        torch.testing.assert_close(opob_of(logits, *rest), exact, atol=2e-3, rtol=0)


def test_the_score_norm_is_that_of_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(6, 9, generator=generator).double()).requires_grad_()
    targets = torch.randint(9, (6,), generator=generator)
    picked = (logits / 0.7).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    # In the logits that the temperature has divided already.
    scores = 0.7 * torch.autograd.grad(picked.sum(), logits)[0]
    mask, ids = torch.tensor([True] * 5 + [False]), torch.tensor([0, 0, 1, 2, 2, 2])
    collision = collision_probability(logits, temperature=0.7)
    found = advantages.score_norms(picked, collision, mask, ids, 4)
    squares = scores.square().sum(-1)
    expected = torch.stack((squares[:2].sum(), squares[2], squares[3:5].sum(), torch.tensor(0.0).double()))
    assert_close(found, expected)


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
    assert_close(whiten(x, mask).numpy()[batch.mask], expected)
    total = moments(x[:4], mask[:4]) + moments(x[4:], mask[4:])
    parts = torch.cat((whiten(x[:4], mask[:4], total), whiten(x[4:], mask[4:], total)))
    assert_close(parts.numpy(), whiten(x, mask).numpy())
    assert not whiten(x, torch.zeros_like(mask)).any()
    assert not whiten(torch.ones(3), torch.tensor([True, False, False])).any()
