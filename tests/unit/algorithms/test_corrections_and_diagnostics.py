"""Behavior weights, KL penalties, the value loss and the diagnostics against the NumPy references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.algorithms import diagnostics
from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.algorithms.kl import kl_estimate, kl_loss
from asyncrlhf.algorithms.losses import value_loss
from asyncrlhf.algorithms.masked import masked_mean
from asyncrlhf.algorithms.statistics import BIN, EffectiveSize, Largest, Mean, Percentile, Spread, Statistic, together
from asyncrlhf.algorithms.weights import (
    behavior_weight,
    interpolated_proximal,
    log_ratio,
    target_anchor,
)
from tests import reference
from tests.numeric import assert_close
from tests.unit.algorithms.batches import assert_same_gradient, gradient, ragged_batch

SEEDS = st.integers(0, 2**32 - 1)
WEIGHTS = {
    "token": reference.behavior_weights,
    "geo": reference.geometric_weights,
    "prod": reference.product_weights,
}


@pytest.mark.parametrize("level", WEIGHTS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_behavior_weights(level: str, seed: int) -> None:
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    raw = WEIGHTS[level](batch.split(batch.prox), batch.split(batch.mu))
    flat = np.concatenate(raw)
    outside = (flat < 0.8) | (flat > 1.3)
    expected = {
        "none": np.ones_like(flat),
        "truncate": np.clip(flat, 0.8, 1.3),
        "mask": np.concatenate(reference.masked_outside(raw, 0.8, 1.3)),
    }
    for mode, values in expected.items():
        found, facts = behavior_weight(
            torch.from_numpy(batch.prox),
            torch.from_numpy(batch.mu),
            mask,
            ids,
            level=level,
            mode=mode,
            low=0.8,
            high=1.3,
        )
        assert_close(found.numpy()[batch.mask], values)
        assert not found.numpy()[~batch.mask].any()
        assert_close(float(facts["behavior_weight_mean"]), values.mean())
        for kind, key in (("truncate", "behavior_truncated_fraction"), ("mask", "behavior_masked_fraction")):
            share = outside.mean() if kind == mode else 0.0
            assert_close(float(facts[key]), share)


def test_the_target_anchor_is_not_below_mu_over_the_cap() -> None:
    """IMPACT (1912.00167): pi / anchor = min(mu / target, 2) pi / mu."""
    target, mu = torch.tensor([0.2, 0.5, 0.9]).log(), torch.tensor([0.8, 0.5, 0.5]).log()
    assert_close(target_anchor(target, mu, 2.0).exp(), torch.tensor([0.4, 0.5, 0.9]))


def test_the_interpolated_proximal_policy_goes_from_mu_towards_theta_with_the_lag() -> None:
    theta = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    mu = torch.full((5,), -3.0, dtype=torch.float64)
    found = interpolated_proximal(theta, mu, torch.tensor([0, 1, 2, 4, 1000]))
    assert_close(found, torch.tensor([-3.0, -3.0, -2.0, -1.5, -1.002], dtype=torch.float64))
    assert not found.requires_grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates(estimator: str) -> None:
    batch = ragged_batch(21)
    mask = batch.tensors()[0]
    policy, ref = torch.from_numpy(batch.prox), torch.from_numpy(batch.ref)
    paper = getattr(reference, estimator)
    expected = [paper(p, r) for p, r in zip(batch.split(batch.prox), batch.split(batch.ref), strict=True)]
    found = kl_estimate(policy, ref, mask, estimator=estimator).numpy()
    assert_close(found[batch.mask], np.concatenate(expected))
    assert not found[~batch.mask].any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_distillations_loss_is_that_of_the_paper(seed: int) -> None:
    """Value and gradient, with weights on both sides of the cap."""
    batch = ragged_batch(seed, spread=1.0)
    mask, ids = batch.tensors()
    ref, mu = batch.split(batch.ref), batch.split(batch.mu)

    def paper(theta: reference.Batch) -> float:
        return reference.token_mean(reference.forward_kl_tokens(theta, ref, mu, 1.5))

    theta = torch.from_numpy(batch.theta.copy()).requires_grad_()
    loss = kl_loss(
        theta, torch.from_numpy(batch.ref), torch.from_numpy(batch.mu), mask, ids,
        estimator="forward", normaliser=normaliser_count("token", mask, ids), ratio_bound=1.5,
    )  # fmt: skip
    assert_close(float(loss.detach()), paper(batch.split(batch.theta)))
    found = gradient(loss, theta)
    assert_same_gradient(found[batch.mask], reference.numeric_gradient(paper, batch.split(batch.theta)), 1e-6)
    assert not found[~batch.mask].any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_value_loss(seed: int) -> None:
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    old, returns = batch.split(batch.prox), batch.split(batch.ref)

    def paper(values: reference.Batch) -> float:
        return reference.token_mean(reference.value_tokens(values, old, returns, 0.3))

    values = torch.from_numpy(batch.theta.copy()).requires_grad_()
    loss = value_loss(
        values, torch.from_numpy(batch.prox), torch.from_numpy(batch.ref), mask, ids,
        clip=0.3, normaliser=normaliser_count("token", mask, ids),
    )  # fmt: skip
    assert_close(float(loss.detach()), paper(batch.split(batch.theta)))
    found = gradient(loss, values)
    assert_same_gradient(found[batch.mask], reference.numeric_gradient(paper, batch.split(batch.theta)), 1e-6)
    assert not found[~batch.mask].any()


def sizes_of(log_weights: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    return tuple(float(EffectiveSize.over(log_weights, mask, share=share)) for share in (False, True))


def test_effective_sample_size_of_known_weights() -> None:
    mask = torch.tensor([True] * 8 + [False] * 2)
    outside = torch.tensor([float("nan"), float("inf")])
    for shift in (0.0, 500.0, -500.0):  # a common factor cancels, even one that no float holds
        equal = torch.cat((torch.full((8,), shift), outside))
        assert sizes_of(equal, mask) == (8.0, 1.0)
        one_hot = torch.cat((torch.tensor([200.0] + [0.0] * 7) + shift, outside))
        assert sizes_of(one_hot, mask) == (1.0, 1 / 8)


def test_the_effective_sample_size_is_that_of_uncut_weights() -> None:
    """One weight of e^12 among a hundred of 1: a common clamp at 2 would report .99 of what is .01."""
    log_weights, mask = torch.zeros(100), torch.ones(100, dtype=torch.bool)
    log_weights[17] = 12.0
    assert_close(sizes_of(log_weights, mask)[1], 0.01, rtol=0.01)
    clamped = log_weights.clamp(max=math.log(2.0))
    assert sizes_of(clamped, mask)[1] > 0.98
    facts = diagnostics.by_lag(log_weights, torch.zeros(1), mask.long(), mask, torch.zeros(100).long())
    assert_close(float(facts["lag_1/ess_fraction"]), 0.01, rtol=0.01)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_weight_diagnostics(seed: int) -> None:
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    facts = diagnostics.weight_diagnostics(torch.from_numpy(batch.prox) - torch.from_numpy(batch.mu), mask, ids)
    pairs = batch.split(batch.prox), batch.split(batch.mu)
    tokens = np.concatenate(reference.behavior_weights(*pairs))
    sequences = np.array([w[0] for w in reference.product_weights(*pairs)])
    assert_close(float(facts["ess"]), reference.ess(tokens))
    assert_close(float(facts["ess_fraction"]), reference.ess(tokens) / len(tokens))
    assert_close(float(facts["sequence_ess"]), reference.ess(sequences))
    assert_close(float(facts["sequence_ess_fraction"]), reference.ess(sequences) / len(sequences))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_diagnostics_by_lag(seed: int) -> None:
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    drift = torch.from_numpy(batch.prox) - torch.from_numpy(batch.mu)
    found = diagnostics.by_lag(drift, torch.from_numpy(batch.rewards), torch.from_numpy(batch.lag), mask, ids)
    logs = drift.numpy()
    expected = {}
    for name, low, high in (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9+", 9, 99)):
        here = batch.mask & (batch.lag >= low) & (batch.lag <= high)
        if here.any():
            w = np.exp(logs[here])
            expected |= {
                f"lag_{name}/ess_fraction": reference.ess(w) / len(w),
                f"lag_{name}/ratio_mean": w.mean(),
                f"lag_{name}/kl": reference.k3(np.zeros(len(w)), logs[here]).mean(),
                f"lag_{name}/reward_mean": batch.rewards[np.unique(batch.sequence_ids[here])].mean(),
                f"lag_{name}/token_fraction": here.sum() / batch.mask.sum(),
            }
    shown = diagnostics.without_empty_lags({key: float(value) for key, value in found.items()})
    assert set(shown) == set(expected)
    for key, value in expected.items():
        assert_close(shown[key], value, what=key)


def test_version_lag() -> None:
    lags = torch.cat((torch.arange(1, 101), torch.tensor([10**9])))
    mask = torch.tensor([True] * 100 + [False])
    found = diagnostics.lag_diagnostics(lags, mask)
    assert {k: float(v) for k, v in found.items()} == {
        "version_lag_mean": 50.5,
        "version_lag_p95": 95.0,
        "version_lag_max": 100.0,
    }


def test_second_moment_of_harmful_tokens() -> None:
    log_ratio = torch.tensor([0.3, -0.3, 0.5, -0.1, 9.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -2.0, float("nan")])
    mask = torch.tensor([True] * 4 + [False])
    found = diagnostics.harmful_second_moment(log_ratio, advantages, mask)
    assert_close(float(found), (0.3**2 + 0.1**2) / 2)


def test_log_ratio_and_clip_diagnostics() -> None:
    rng = np.random.default_rng(0)
    values, keep = rng.standard_normal(1000), rng.random(1000) < 0.5
    x, mask = torch.from_numpy(np.where(keep, values, np.nan)), torch.from_numpy(keep)
    facts = diagnostics.log_ratio_diagnostics(x, mask, "policy")
    kept = values[keep]
    assert_close(float(facts["policy_log_ratio_mean"]), kept.mean())
    assert_close(float(facts["policy_log_ratio_abs_mean"]), np.abs(kept).mean())
    expected = np.quantile(np.abs(kept), 0.99, method="inverted_cdf")
    assert expected <= float(facts["policy_log_ratio_abs_p99"]) <= expected * (1 + BIN)
    assert_close(float(facts["policy_log_ratio_abs_max"]), np.abs(kept).max())

    clipped = torch.tensor([True, False, True, True, True])
    advantages = torch.tensor([1.0, 1.0, -1.0, 0.0, float("nan")])
    shares = diagnostics.clip_diagnostics(clipped, advantages, torch.tensor([True] * 4 + [False]))
    assert {k: float(v) for k, v in shares.items()} == {
        "clip_fraction": 0.75,
        "clip_fraction_positive": 0.5,
        "clip_fraction_negative": 1.0,
    }


def test_kl_diagnostics_estimate_both_directions() -> None:
    """Over every token of a small alphabet, weighted by the sampler through repetition, they are the exact KLs."""
    counts = np.array([1, 2, 5])
    sampler, policy = np.log(counts / 8), np.log(np.array([0.5, 0.2, 0.3]))
    packed = [torch.from_numpy(np.repeat(x, counts)) for x in (policy, sampler)]
    facts = diagnostics.kl_diagnostics(*packed, torch.ones(8, dtype=torch.bool), "behavior")
    forward = (np.exp(sampler) * (sampler - policy)).sum()
    backward = (np.exp(policy) * (policy - sampler)).sum()
    assert_close(float(facts["behavior_kl"]), forward)
    assert_close(float(facts["behavior_reverse_kl"]), backward)
    assert_close(float(facts["behavior_max_abs_dprob"]), 0.375)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 4.0, float("nan")]), torch.tensor([True, True, True, False])
    assert float(diagnostics.explained_variance(returns, returns, mask)) == 1.0
    assert_close(float(diagnostics.explained_variance(torch.full((4,), 7.0), returns, mask)), 0.0)
    assert float(diagnostics.explained_variance(returns, torch.ones(4), mask)) == 0.0
    # A hundred equal returns, made as advantage plus value in float32: what is left of their spread is rounding.
    values = 3 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    for constant in (0.0, 0.1, 1.0, 700.0):
        rounded = (constant - values) + values
        assert float(diagnostics.explained_variance(values, rounded, values == values)) == 0.0
    small = torch.tensor([1.0, 1.001, 1.002, 1.003])
    assert float(diagnostics.explained_variance(small, small, small > 0)) == 1.0


@pytest.mark.parametrize("size", [0, 3])
def test_every_diagnostic_of_an_empty_mask_is_zero(size: int) -> None:
    x, mask, ids = torch.full((size,), float("nan")), torch.zeros(size, dtype=torch.bool), torch.zeros(size).long()
    facts = {
        **diagnostics.weight_diagnostics(x, mask, ids),
        **diagnostics.log_ratio_diagnostics(x, mask, "policy"),
        **diagnostics.kl_diagnostics(x, x, mask, "behavior"),
        **diagnostics.clip_diagnostics(mask, x, mask),
        **behavior_weight(x, x, mask, ids)[1],
        **diagnostics.lag_diagnostics(ids, mask),
        **diagnostics.by_lag(x, torch.ones(1), ids, mask, ids),
        "explained_variance": diagnostics.explained_variance(x, x, mask),
        "harmful_second_moment": diagnostics.harmful_second_moment(x, x, mask),
        "mean": masked_mean(x, mask),
    }
    assert all(float(v) == 0.0 for v in facts.values()), facts
    assert not log_ratio(x, x, mask, ids, "geo").any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS, ranks=st.integers(2, 4))
def test_the_statistics_of_ranks_add_up_to_those_of_one_rank(seed: int, ranks: int) -> None:
    """Whole sequences on each rank, some ranks with none; a rank that weighs e^300 less must not vanish or overflow."""
    batch = ragged_batch(seed)
    mask, ids = batch.tensors()
    rng = np.random.default_rng(seed)
    owner = torch.from_numpy(rng.integers(0, ranks, len(batch.rewards)))
    prox, mu, lag = (torch.from_numpy(x) for x in (batch.prox, batch.mu, batch.lag))
    prox = prox + 300.0 * owner[ids]
    rewards, values = torch.from_numpy(batch.rewards), torch.from_numpy(rng.standard_normal(len(batch.mu)))

    def found(own: torch.Tensor) -> dict[str, Statistic]:
        numbers = torch.unique(ids[own], return_inverse=True)[1] if own.any() else ids[own]
        drift, here, lags = (prox - mu)[own], mask[own], lag[own]
        return {
            **diagnostics.weight_diagnostics(drift, here, numbers),
            **diagnostics.log_ratio_diagnostics(drift, here, "behavior"),
            **diagnostics.kl_diagnostics(prox[own], mu[own], here, "behavior"),
            **diagnostics.lag_diagnostics(lags, here),
            **diagnostics.by_lag(drift, rewards[torch.unique(ids[own])], lags, here, numbers),
            "explained_variance": diagnostics.explained_variance(values[own], mu[own], here),
        }

    whole = found(torch.ones_like(mask))
    merged = together([found(owner[ids] == rank) for rank in range(ranks)])
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        assert_close(float(merged[key]), float(value), rtol=1e-9, atol=1e-9, what=key)


def test_percentiles_of_broken_and_of_no_values() -> None:
    def p99(*values: float) -> float:
        return float(Percentile.of_sizes(torch.tensor(values), 0.99))

    assert (p99(), p99(0.0, 0.0), p99(0.0, math.inf), p99(1.0, math.nan)) == (0.0, 0.0, math.inf, math.inf)
    assert 3e-7 <= p99(*[1e-9] * 50, *[3e-7] * 2) <= 3e-7 * (1 + BIN)


@pytest.mark.parametrize("cut", [0, 1, 13, 40])
def test_statistics_of_two_ranks_add_up_to_those_of_all_tokens(cut: int) -> None:
    logs = 3 * torch.randn(40, generator=torch.Generator().manual_seed(cut)).double()
    everywhere = torch.ones(40, dtype=torch.bool)

    def found(part: slice) -> list[Statistic]:
        x, mask = logs[part], everywhere[part]
        sizes = [EffectiveSize.over(x, mask, share=share) for share in (False, True)]
        quantiles = [Percentile.of_sizes(x.abs(), 0.9), Percentile.of_integers(x.round(), 0.5)]
        return [Mean.over(x, mask), Spread.over(x, mask), Largest.of(x), *sizes, *quantiles]

    for mine, theirs, whole in zip(found(slice(0, cut)), found(slice(cut, 40)), found(slice(0, 40)), strict=True):
        assert_close(float(mine + theirs), float(whole))
        assert_close(float(theirs + mine), float(whole))
