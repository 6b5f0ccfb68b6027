"""The policy-loss kernel has the gradients of the papers' losses, whatever the batch's shape and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlhf.algorithms.aggregate import AGGREGATES, normaliser_count
from asyncrlhf.algorithms.coefficients import COEFFICIENTS, band, cap, clip, one
from asyncrlhf.algorithms.losses import PolicyLoss, policy_loss
from asyncrlhf.algorithms.weights import LEVELS, behavior_weight
from tests import reference
from tests.reference import Batch
from tests.unit.algorithms.batches import RaggedBatch, gradient, ragged_batch, relative_error

SEEDS = st.integers(0, 2**32 - 1)
LENGTH = 11.0
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """A paper's loss as a function of theta, and the switches that should give its gradient."""

    paper: Callable[[RaggedBatch, Batch], float]
    switches: dict[str, Any]
    anchor: str | None = "prox"
    correction: dict[str, Any] | None = None
    sequence_level: bool = False


def _ppo(aggregate: Callable[[Batch], float], low: float, high: float, dual: float | None = None) -> Any:
    def paper(b: RaggedBatch, theta: Batch) -> float:
        old, adv = b.split(b.prox), b.split(b.token_advantages)
        return aggregate(reference.ppo_tokens(theta, old, adv, low, high, dual))

    return paper


def _corrected(weights: Callable[[Batch, Batch], Batch]) -> Any:
    """Decoupled PPO (2505.24298) with any weight: sg(w) times the clipped loss around the proximal policy."""

    def paper(b: RaggedBatch, theta: Batch) -> float:
        prox, mu = b.split(b.prox), b.split(b.mu)
        losses = reference.ppo_tokens(theta, prox, b.split(b.token_advantages), 0.2, 0.3)
        return reference.token_mean(reference.weighted(losses, weights(prox, mu)))

    return paper


def _sequence(loss: Callable[..., float], *bounds: float) -> Any:
    def paper(b: RaggedBatch, theta: Batch) -> float:
        return loss(theta, b.split(b.prox), b.sequence_advantages[b.trained], *bounds)

    return paper


def _cispo(b: RaggedBatch, theta: Batch) -> float:
    losses = reference.cispo_tokens(theta, b.split(b.theta), b.split(b.prox), b.split(b.token_advantages), 0.0, 1.2)
    return reference.token_mean(losses)


def _band(b: RaggedBatch, theta: Batch) -> float:
    return reference.token_mean(reference.band_tokens(theta, b.split(b.mu), b.split(b.token_advantages), 0.7, 1.6))


def _tis_reinforce(b: RaggedBatch, theta: Batch) -> float:
    weights = reference.truncated(reference.behavior_weights(b.split(b.prox), b.split(b.mu)), 1.5)
    losses = reference.reinforce_tokens(theta, b.split(b.token_advantages))
    return reference.sequence_mean_of_token_sums(reference.weighted(losses, weights))


CLIP = {"coefficient": clip(0.2, 0.3)}
CASES = {
    "ppo, token mean (dapo)": Case(_ppo(reference.token_mean, 0.2, 0.3), {**CLIP, "aggregate": "token"}),
    "ppo, dual clip": Case(
        _ppo(reference.token_mean, 0.2, 0.3, dual=1.5), {"coefficient": clip(0.2, 0.3, 1.5), "aggregate": "token"}
    ),
    "grpo": Case(
        _ppo(reference.sequence_mean_of_token_means, 0.2, 0.2),
        {"coefficient": clip(0.2, 0.2), "aggregate": "seq_mean"},
    ),
    "dr_grpo": Case(_ppo(reference.constant_length(LENGTH), 0.2, 0.3), {**CLIP, "aggregate": "const"}),
    "rloo": Case(
        lambda b, theta: reference.rloo(theta, b.sequence_advantages[b.trained]),
        {"coefficient": one(), "aggregate": "seq_sum"},
        anchor=None,
        sequence_level=True,
    ),
    "gspo": Case(
        _sequence(reference.gspo, 0.05, 0.1),
        {"coefficient": clip(0.05, 0.1), "level": "geo", "aggregate": "seq_mean"},
        sequence_level=True,
    ),
    "proximal rloo": Case(
        _sequence(reference.sequence_ppo, 0.3, 0.6),
        {"coefficient": clip(0.3, 0.6), "level": "prod", "aggregate": "seq_sum"},
        sequence_level=True,
    ),
    "cispo": Case(_cispo, {"coefficient": cap(0.0, 1.2), "aggregate": "token"}),
    "band": Case(_band, {"coefficient": band(0.7, 1.6), "aggregate": "token"}, anchor="mu"),
    "reinforce with tis": Case(
        _tis_reinforce,
        {"coefficient": one(), "aggregate": "seq_sum"},
        anchor=None,
        correction={"level": "token", "mode": "truncate", "high": 1.5},
    ),
    "decoupled, mask at 1.5": Case(
        _corrected(lambda p, m: reference.masked_outside(reference.behavior_weights(p, m), 0.0, 1.5)),
        CLIP,
        correction={"level": "token", "mode": "mask", "high": 1.5},
    ),
    "decoupled, truncate": Case(
        _corrected(lambda p, m: reference.truncated(reference.behavior_weights(p, m), 1.2)),
        CLIP,
        correction={"level": "token", "mode": "truncate", "high": 1.2},
    ),
    "decoupled, geometric mask": Case(
        _corrected(lambda p, m: reference.masked_outside(reference.geometric_weights(p, m), 0.9, 1.2)),
        CLIP,
        correction={"level": "geo", "mode": "mask", "low": 0.9, "high": 1.2},
    ),
    "decoupled, product truncate": Case(
        _corrected(lambda p, m: reference.truncated(reference.product_weights(p, m), 2.0)),
        CLIP,
        correction={"level": "prod", "mode": "truncate", "high": 2.0},
    ),
}


def run_kernel(
    batch: RaggedBatch,
    theta: torch.Tensor,
    *,
    anchor: str | None = "prox",
    correction: dict[str, Any] | None = None,
    sequence_level: bool = False,
    sequences: list[int] | None = None,
    normaliser: float | None = None,
    sample_weights: np.ndarray | None = None,
    **switches: Any,
) -> PolicyLoss:
    """The kernel on ``batch`` or on some of its sequences only, as a microbatch would hold them."""
    mask, ids = batch.tensors()
    kept = torch.ones_like(mask) if sequences is None else torch.isin(ids, torch.tensor(sequences))
    advantages = batch.per_token(batch.sequence_advantages) if sequence_level else batch.token_advantages
    mask, ids = mask[kept], torch.unique(ids[kept], return_inverse=True)[1]
    prox, mu = torch.from_numpy(batch.prox)[kept], torch.from_numpy(batch.mu)[kept]
    weight = None if correction is None else behavior_weight(prox, mu, mask, ids, **correction)[0]
    how = switches.setdefault("aggregate", "token")
    count = normaliser_count(how, mask, ids, constant_length=LENGTH if how == "const" else None)
    return policy_loss(
        theta[kept],
        {"prox": prox, "mu": mu, None: None}[anchor],
        torch.from_numpy(advantages)[kept],
        mask,
        ids,
        weight=weight,
        normaliser=count if normaliser is None else normaliser,
        sample_weights=None if sample_weights is None else torch.from_numpy(sample_weights),
        **switches,
    )


def leaf(batch: RaggedBatch) -> torch.Tensor:
    return torch.from_numpy(batch.theta.copy()).requires_grad_()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_gradient_is_that_of_the_paper(name: str, seed: int) -> None:
    case, batch = CASES[name], ragged_batch(seed)
    theta = leaf(batch)
    result = run_kernel(
        batch,
        theta,
        anchor=case.anchor,
        correction=case.correction,
        sequence_level=case.sequence_level,
        **dict(case.switches),
    )
    found = gradient(result.loss, theta)
    expected = reference.numeric_gradient(lambda moved: case.paper(batch, moved), batch.split(batch.theta))
    assert relative_error(found[batch.mask], expected) < TOLERANCE
    assert not found[~batch.mask].any(), "what lies outside the mask must get a gradient of exactly zero"


def test_the_clip_rules_of_the_cases_act_at_all() -> None:
    """Guards the comparison above: each rule drops or bounds some tokens of these batches, and not all."""
    for name, case in CASES.items():
        acted = []
        for seed in range(20):
            batch = ragged_batch(seed)
            result = run_kernel(
                batch,
                leaf(batch),
                anchor=case.anchor,
                sequence_level=case.sequence_level,
                **dict(case.switches),
            )
            acted += result.clipped[torch.from_numpy(batch.mask)].tolist()
        share = np.mean(acted)
        assert share == 0 if case.anchor is None else 0.02 < share < 0.9, (name, share)


def test_value_is_the_surrogate_where_nothing_is_clipped() -> None:
    batch = ragged_batch(3)
    wide = run_kernel(batch, leaf(batch), coefficient=clip(0.999, 1e6))
    paper = _ppo(reference.token_mean, 0.999, 1e6)(batch, batch.split(batch.theta))
    assert float(wide.loss.detach()) == pytest.approx(paper, rel=1e-12)


RULES = {"one": one(), "clip": clip(0.2, 0.2, 3.0), "cap": cap(0.0, 5.0), "band": band(0.5, 2.0)}


@pytest.mark.parametrize("rule", sorted(COEFFICIENTS))
@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_invariants_of_every_switch(rule: str, level: str, aggregate: str) -> None:
    batch = ragged_batch(11)
    switches: dict[str, Any] = {"coefficient": RULES[rule], "level": level, "aggregate": aggregate}

    # r = 1 everywhere: plain policy gradient, whichever policy stands below the ratio.
    on_policy = RaggedBatch(**{**vars(batch), "prox": batch.theta, "mu": batch.theta})
    theta = leaf(on_policy)
    plain = run_kernel(on_policy, theta, anchor=None, coefficient=one(), aggregate=aggregate)
    same = run_kernel(on_policy, theta, anchor="prox", **switches)
    assert relative_error(gradient(same.loss, theta), gradient(plain.loss, theta)) < 1e-12

    # A = 0: no gradient at all. Nothing masked in: zero, not NaN.
    idle = RaggedBatch(**{**vars(batch), "token_advantages": np.zeros(len(batch.mask))})
    empty = RaggedBatch(**{**vars(batch), "mask": np.zeros_like(batch.mask)})
    for still in (idle, empty):
        theta = leaf(still)
        result = run_kernel(still, theta, correction={"mode": "mask", "high": 5.0}, **switches)
        assert float(result.loss.detach()) == 0.0
        assert not gradient(result.loss, theta).any()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_microbatches_and_ranks_add_up_to_the_full_batch(name: str, seed: int) -> None:
    case, batch = CASES[name], ragged_batch(seed, max_sequences=6)
    rng = np.random.default_rng(seed)
    sample_weights = rng.random(batch.num_sequences)
    how = case.switches.get("aggregate", "token")
    parts = np.array_split(rng.permutation(batch.num_sequences), 3)
    parts = [sorted(p.tolist()) for p in parts if len(p)]
    mask, ids = batch.tensors()

    def count(sequences: list[int]) -> float:
        kept = torch.isin(ids, torch.tensor(sequences))
        local_ids = torch.unique(ids[kept], return_inverse=True)[1]
        length = LENGTH if how == "const" else None
        return float(normaliser_count(how, mask[kept], local_ids, constant_length=length))

    def loss(theta: torch.Tensor, sequences: list[int] | None, normaliser: float) -> torch.Tensor:
        return run_kernel(
            batch,
            theta,
            anchor=case.anchor,
            correction=case.correction,
            sequence_level=case.sequence_level,
            sequences=sequences,
            normaliser=normaliser,
            sample_weights=sample_weights if sequences is None else sample_weights[sequences],
            **dict(case.switches),
        ).loss

    total = sum(count(p) for p in parts)
    assert total == count(list(range(batch.num_sequences)))
    theta = leaf(batch)
    whole = loss(theta, None, total)
    split = torch.stack([loss(theta, p, total) for p in parts]).sum()
    assert float(split.detach()) == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-15)
    assert relative_error(gradient(split, theta), gradient(whole, theta)) < 1e-12


def test_sample_weights_multiply_sequences_without_changing_the_normaliser() -> None:
    batch = ragged_batch(5)
    rng = np.random.default_rng(0)
    sample_weights = rng.random(batch.num_sequences)
    theta = leaf(batch)
    bare = gradient(run_kernel(batch, theta, **dict(CLIP)).loss, theta)
    found = gradient(run_kernel(batch, theta, sample_weights=sample_weights, **dict(CLIP)).loss, theta)
    np.testing.assert_allclose(found, bare * sample_weights[batch.sequence_ids], rtol=1e-12)


def test_a_ratio_beyond_float_range_stays_finite() -> None:
    theta = torch.tensor([-1.0, -2.0], requires_grad=True)
    mask, ids = torch.tensor([True, True]), torch.tensor([0, 0])
    result = policy_loss(
        theta, theta.detach() - 500.0, torch.tensor([0.0, 1.0]), mask, ids,
        coefficient=cap(0.0, float("inf")), level="prod", normaliser=1.0,
    )  # fmt: skip
    found = gradient(result.loss, theta)
    assert found[0] == 0.0 and np.isfinite(found).all()


def test_senseless_switches_are_refused() -> None:
    mask, ids = torch.tensor([True]), torch.tensor([0])
    with pytest.raises(ValueError, match="dual_clip"):
        clip(0.2, 0.2, 0.5)
    with pytest.raises(ValueError, match="constant length"):
        normaliser_count("const", mask, ids)
    with pytest.raises(ValueError, match="allowed: token"):
        normaliser_count("mean", mask, ids)
