"""The policy-loss kernel has the gradients of the papers' losses, whatever the batch's shape and padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.algorithms.aggregate import AGGREGATES, normaliser_count
from asyncrlhf.algorithms.coefficients import (
    COEFFICIENTS,
    RatioFacts,
    band,
    cap,
    clip,
    dprob,
    gamma,
    geoclip,
    one,
    signed,
    soft,
)
from asyncrlhf.algorithms.losses import policy_loss
from asyncrlhf.algorithms.weights import LEVELS, target_anchor
from tests import reference
from tests.numeric import assert_close
from tests.unit.algorithms.batches import RaggedBatch, assert_same_gradient, gradient, ragged_batch
from tests.unit.algorithms.cases import CASES, LENGTH, PRESETS, Case, run
from tests.unit.algorithms.gains import GIVEN
from tests.unit.algorithms.test_heads import HEADS

SEEDS = st.integers(0, 2**32 - 1)
TOLERANCE = 1e-6


def leaf(batch: RaggedBatch) -> torch.Tensor:
    return torch.from_numpy(batch.theta.copy()).requires_grad_()


def grouped_batch(seed: int) -> RaggedBatch:
    return ragged_batch(seed, min_sequences=2, max_sequences=6)


def test_every_preset_has_its_paper_here() -> None:
    presets = {path.stem for path in Path("conf/algorithm").glob("*.yaml")}
    # Distillation's loss is a KL: test_corrections_and_diagnostics.py.
    assert presets == set(PRESETS) | set(HEADS) | {"distill"}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_gradient_is_that_of_the_paper(name: str, seed: int) -> None:
    case, batch = CASES[name], grouped_batch(seed)
    theta, advantages = leaf(batch), case.gain.paper(batch)
    found = gradient(run(case, batch, theta).loss, theta)
    expected = reference.numeric_gradient(lambda moved: case.paper(batch, moved, advantages), batch.split(batch.theta))
    assert_same_gradient(found[batch.mask], expected, TOLERANCE)
    assert not found[~batch.mask].any(), "what lies outside the mask must get a gradient of exactly zero"


def test_impact_clips_the_product_and_not_the_ratio_to_the_target() -> None:
    """Gradients in float64 against RLlib's rule with its cap of 2, on tokens on both sides of mu = 2 target; on the
    far side the clip of pi / target with the weight min(1, 2 target / mu) afterwards is another rule."""
    batch = ragged_batch(0, min_sequences=40, max_sequences=40, spread=1.0)
    mask, ids = batch.tensors()
    theta, mu, target = leaf(batch), torch.from_numpy(batch.mu), torch.from_numpy(batch.target)
    advantages, low, high = torch.from_numpy(batch.token_advantages), 0.4, 0.4
    settings = {"coefficient": clip(low, high), "normaliser": normaliser_count("token", mask, ids)}
    loss = policy_loss(theta, target_anchor(target, mu, 2.0), advantages, mask, ids, **settings).loss
    found = gradient(loss, theta)[batch.mask]
    parts = [batch.split(x) for x in (batch.target, batch.mu, batch.token_advantages)]
    expected = reference.numeric_gradient(
        lambda moved: reference.token_mean(reference.impact_tokens(moved, *parts, (low, high), 2.0)),
        batch.split(batch.theta),
    )
    assert_same_gradient(found, expected, TOLERANCE)
    far = (batch.mu > batch.target + np.log(2))[batch.mask]
    assert 0.1 < far.mean() < 0.9
    weight = (2 * (target - mu).exp()).clamp(max=1.0)
    after = policy_loss(theta, target, advantages, mask, ids, weight=weight, **settings).loss
    other = gradient(after, theta)[batch.mask]
    assert_close(other[~far], found[~far])
    assert (~np.isclose(other[far], found[far])).mean() > 0.1, "they agree where neither clips"


NEVER_CLIP = {"reinforce", "rloo", "asymre", "vcpo", "vtrace", "sapo", "vespo", "tis on reinforce", "soft a token"}


def test_the_rules_of_the_cases_act_at_all() -> None:
    """Guards the comparison above: each rule drops or bounds some tokens of these batches, and not all."""
    for name, case in CASES.items():
        acted = []
        for seed in range(20):
            batch = grouped_batch(seed)
            acted += run(case, batch, leaf(batch)).clipped[torch.from_numpy(batch.mask)].tolist()
        share = np.mean(acted)
        assert share == 0 if name in NEVER_CLIP else 0.02 < share < 0.9, (name, share)


def test_value_is_the_surrogate_where_nothing_is_clipped() -> None:
    batch = ragged_batch(3)
    wide = run(Case(lambda *_: 0.0, clip(0.999, 1e6), GIVEN), batch, leaf(batch))
    theta, prox, adv = (batch.split(x) for x in (batch.theta, batch.prox, batch.token_advantages))
    paper = reference.token_mean(reference.ppo_tokens(theta, prox, adv, 0.999, 1e6))
    assert_close(float(wide.loss.detach()), paper)


RULES = {
    "one": one(),
    "clip": clip(0.2, 0.2, 3.0),
    "cap": cap(0.0, 5.0),
    "band": band(0.5, 2.0),
    "signed": signed(),
    "soft": soft(1.0, 1.05),
    "gamma": gamma(2.0, 3.0, 3.0, 2.0),
    "dprob": dprob(0.2, 0.2, 20.0),
    "geoclip": geoclip(0.4, 0.4),
}
SWITCHES = {
    f"{rule}, {level}, {aggregate}": Case(lambda *_: 0.0, RULES[rule], GIVEN, level=level, aggregate=aggregate)
    for rule in sorted(COEFFICIENTS)
    for level in sorted(LEVELS)
    for aggregate in AGGREGATES
}


@pytest.mark.parametrize("name", CASES | SWITCHES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=SEEDS)
@pytest.mark.more_but(every=3)
def test_invariants_of_every_preset_and_switch(name: str, seed: int) -> None:
    case, batch = (CASES | SWITCHES)[name], grouped_batch(seed)

    # r = 1 everywhere: plain policy gradient, whichever policies stand below the ratio and in the weight.
    same = batch.on_policy()
    theta = leaf(same)
    plain = Case(lambda *_: 0.0, one(), case.gain, aggregate=case.aggregate, anchor=None)
    expected = gradient(run(plain, same, theta).loss, theta)
    assert_same_gradient(gradient(run(case, same, theta).loss, theta), expected)

    # A = 0: no gradient at all. Nothing masked in: zero, not NaN.
    empty = replace(batch, mask=np.zeros_like(batch.mask))
    for still, advantages in ((batch, torch.zeros(len(batch.mask)).double()), (empty, None)):
        theta = leaf(still)
        loss = run(case, still, theta, advantages=advantages).loss
        assert float(loss.detach()) == 0.0
        assert not gradient(loss, theta).any()

    # What lies outside the mask is never looked at.
    theta = leaf(batch)
    expected = gradient(run(case, batch, theta).loss, theta)
    for filler in (0.0, 1e30, float("nan"), float("-inf")):
        other = batch.repoisoned(filler)
        theta = leaf(other)
        np.testing.assert_array_equal(gradient(run(case, other, theta).loss, theta), expected)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_microbatches_and_ranks_add_up_to_the_full_batch(name: str, seed: int) -> None:
    case, batch = CASES[name], grouped_batch(seed)
    rng = np.random.default_rng(seed)
    sample_weights = rng.random(batch.num_sequences)
    parts = np.array_split(rng.permutation(batch.num_sequences), 3)
    parts = [sorted(p.tolist()) for p in parts if len(p)]
    mask, ids = batch.tensors()
    # Of the whole update: whitened over it, or relative to siblings that other microbatches hold.
    advantages = case.gain.ours(batch)

    def count(sequences: list[int]) -> float:
        kept = torch.isin(ids, torch.tensor(sequences))
        local_ids = torch.unique(ids[kept], return_inverse=True)[1]
        length = LENGTH if case.aggregate == "const" else None
        return float(normaliser_count(case.aggregate, mask[kept], local_ids, constant_length=length))

    def loss(theta: torch.Tensor, sequences: list[int], normaliser: float) -> torch.Tensor:
        weights = sample_weights[sequences]
        return run(
            case, batch, theta,
            advantages=advantages, sequences=sequences, normaliser=normaliser, sample_weights=weights,
        ).loss  # fmt: skip

    everything = list(range(batch.num_sequences))
    total = sum(count(p) for p in parts)
    assert total == count(everything)
    theta = leaf(batch)
    whole = loss(theta, everything, total)
    split = torch.stack([loss(theta, p, total) for p in parts]).sum()
    assert_close(float(split.detach()), float(whole.detach()))
    assert_same_gradient(gradient(split, theta), gradient(whole, theta))


def test_sample_weights_multiply_sequences_without_changing_the_normaliser() -> None:
    batch = ragged_batch(5)
    sample_weights = np.random.default_rng(0).random(batch.num_sequences)
    theta, case = leaf(batch), Case(lambda *_: 0.0, clip(0.2, 0.3), GIVEN)
    bare = gradient(run(case, batch, theta).loss, theta)
    found = gradient(run(case, batch, theta, sample_weights=sample_weights).loss, theta)
    assert_close(found, bare * sample_weights[batch.sequence_ids])


def test_a_gate_takes_tokens_out_without_changing_the_normaliser() -> None:
    batch = ragged_batch(5)
    keep = np.random.default_rng(0).random(len(batch.mask)) < 0.5
    theta, case = leaf(batch), Case(lambda *_: 0.0, one(), GIVEN, anchor=None)
    bare = gradient(run(case, batch, theta).loss, theta)
    gated = run(replace(case, gate=lambda *_: torch.from_numpy(keep)), batch, theta)
    np.testing.assert_array_equal(gradient(gated.loss, theta), np.where(keep, bare, 0.0))
    np.testing.assert_array_equal(gated.clipped.numpy(), ~keep & batch.mask)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("drift", [-500.0, 500.0])
def test_a_ratio_beyond_float_range_stays_finite(rule: str, drift: float) -> None:
    theta = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    mask, ids = torch.tensor([True] * 3), torch.tensor([0, 0, 0])
    level = "token" if rule == "geoclip" else "prod"
    result = policy_loss(
        theta, theta.detach() - drift, torch.tensor([0.0, 1.0, -1.0]), mask, ids,
        coefficient=RULES[rule], level=level, normaliser=1.0,
    )  # fmt: skip
    found = gradient(result.loss, theta)
    assert found[0] == 0.0 and np.isfinite(found).all()


def test_senseless_switches_are_refused() -> None:
    mask, ids = torch.tensor([True]), torch.tensor([0])
    with pytest.raises(ValueError, match="dual_clip"):
        clip(0.2, 0.2, 0.5)(RatioFacts(*torch.ones(4, 1), mask, ids))
    with pytest.raises(ValueError, match="constant length"):
        normaliser_count("const", mask, ids)
    with pytest.raises(ValueError, match="allowed: token"):
        normaliser_count("mean", mask, ids)


def test_the_signed_rule_acts_on_negative_advantages_alone() -> None:
    ratio, gains = torch.tensor([2.0, 2.0, 2.0, 0.5]), torch.tensor([-1.0, 0.0, 1.0, -1.0])
    nothing, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    found, clipped = signed(0.0, 1.0)(RatioFacts(ratio, gains, nothing, nothing, mask, torch.zeros(4).long()))
    assert found.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert clipped.tolist() == [True, False, False, False]
