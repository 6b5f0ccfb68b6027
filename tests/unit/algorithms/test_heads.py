"""The heads' coefficients, sent through the kernel, have the gradients of the papers' losses on sequences and pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from asyncrlhf.algorithms.coefficients import one
from asyncrlhf.algorithms.heads import pair, regress
from asyncrlhf.algorithms.losses import policy_loss
from asyncrlhf.algorithms.masked import masked_values, segment_sum
from tests import reference
from tests.numeric import assert_close
from tests.reference import Batch
from tests.unit.algorithms.batches import RaggedBatch, assert_same_gradient, gradient, ragged_batch

SEEDS = st.integers(0, 2**32 - 1)
BETA, VSTAR_BETA = 0.5, 0.8
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Head:
    """``paper(D, D now, rewards)`` sums over one group, times the multiple that ``heads`` documents."""

    paper: Callable[[Array, Array, Array], float]
    ours: Callable[..., tuple[Tensor, Tensor]]
    options: dict[str, Any]
    anchor: str = "ref"
    has_value: bool = True  # False: the paper's value differs from ours by a constant


def _copg(d: Array, now: Array, r: Array) -> float:
    return (len(r) - 1) / (2 * BETA * len(r)) * reference.copg(d, r, BETA)


def _a_star(d: Array, now: Array, r: Array) -> float:
    return reference.a_star(d, r, VSTAR_BETA, BETA) / (2 * BETA)


GROUP = {"beta": BETA, "target": "group"}
VSTAR = {"beta": BETA, "target": "vstar", "vstar_beta": VSTAR_BETA}
HEADS = {
    "tba": Head(lambda d, now, r: BETA / 2 * reference.tba(d, now, r, BETA), regress, GROUP),
    "copg": Head(_copg, regress, GROUP),
    "opmd": Head(
        lambda d, now, r: reference.opmd(d, r, BETA), regress, {"beta": BETA, "target": "mean"}, "mu", has_value=False
    ),
    "apo": Head(_a_star, regress, VSTAR),
    "oapl": Head(_a_star, regress, VSTAR, "mu"),
    "online_dpo": Head(
        lambda d, now, r: reference.over_pairs(reference.dpo(BETA), d, r), pair, {"beta": BETA, "kind": "dpo"}
    ),
    "ipo": Head(lambda d, now, r: reference.over_pairs(reference.ipo(BETA), d, r), pair, {"beta": BETA, "kind": "ipo"}),
    "best_of_n": Head(lambda d, now, r: reference.best_of_n(d, r), pair, {"beta": 0.0, "kind": "best"}),
}


def sums(theta: Batch, anchor: Batch) -> Array:
    return np.array([(s - a).sum() for s, a in zip(theta, anchor, strict=True)])


def kernel(head: Head, batch: RaggedBatch, theta: Tensor, rewards: Array) -> tuple[Tensor, Tensor]:
    """(the kernel's loss, the head's own losses [N])."""
    mask, ids = batch.tensors()
    drift = masked_values(theta.detach() - torch.from_numpy(getattr(batch, head.anchor)), mask)
    coefficients, losses = head.ours(
        segment_sum(drift, ids, batch.num_sequences),
        torch.from_numpy(rewards),
        torch.from_numpy(batch.group_ids),
        **head.options,
    )
    result = policy_loss(
        theta, None, coefficients[ids], mask, ids, coefficient=one(), aggregate="seq_sum", normaliser=1.0
    )
    return result.loss, losses


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=SEEDS, ties=st.booleans())
def test_gradient_and_value_are_those_of_the_paper(name: str, seed: int, ties: bool) -> None:
    head, batch = HEADS[name], ragged_batch(seed, max_sequences=7)
    rewards = np.round(batch.rewards) if ties else batch.rewards
    anchor, now = batch.split_all(getattr(batch, head.anchor)), batch.split_all(batch.theta)

    def paper(theta: Batch) -> float:
        d, fixed = sums(theta, anchor), sums(now, anchor)
        groups = [batch.group_ids == g for g in np.unique(batch.group_ids)]
        return sum(head.paper(d[m], fixed[m], rewards[m]) for m in groups)

    theta = torch.from_numpy(batch.theta.copy()).requires_grad_()
    loss, losses = kernel(head, batch, theta, rewards)
    found = gradient(loss, theta)
    assert_same_gradient(found[batch.mask], reference.numeric_gradient(paper, now), 1e-6)
    assert not found[~batch.mask].any()
    if head.has_value:
        assert_close(float(losses.sum()), paper(now))


def test_contrastive_policy_gradient_is_trajectory_balance() -> None:
    """CoPG = K / (K - 1) times the squared residuals of TBA, in value and in gradient."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 8):
        d, rewards = rng.standard_normal((2, size))
        residuals = BETA**2 * reference.tba(d, d, rewards, BETA)
        assert_close(reference.copg(d, rewards, BETA), size / (size - 1) * residuals)
        coefficients, losses = regress(
            torch.from_numpy(d), torch.from_numpy(rewards), torch.zeros(size).long(), beta=BETA, target="group"
        )
        assert_close(2 * BETA * float(losses.sum()), residuals)

        def copg(moved: Batch) -> float:
            return reference.copg(moved[0], rewards, BETA)  # noqa: B023

        slope = -2 * BETA * size / (size - 1) * coefficients.numpy()
        assert_same_gradient(slope, reference.numeric_gradient(copg, [d]), 1e-6)


def test_the_optimal_policy_leaves_nothing_to_regress() -> None:
    """At pi = ref exp(R / beta) / Z every residual is zero, whatever Z."""
    rewards = torch.tensor([0.3, -1.0, 2.0]).double()
    coefficients, losses = regress(rewards / BETA - 1.7, rewards, torch.tensor([4, 4, 4]), beta=BETA, target="group")
    assert_close(coefficients, torch.zeros_like(coefficients))
    assert_close(losses, torch.zeros_like(losses))


@pytest.mark.parametrize("kind", ["dpo", "ipo", "best"])
def test_groups_without_a_pair_give_zeros(kind: str) -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 5.0, 0.0, 2.0]), torch.tensor([3, 3, 8, 1, 1])
    coefficients, losses = pair(torch.ones(5), rewards, groups, beta=BETA, kind=kind)
    assert not coefficients[:3].any() and not losses[:3].any()
    assert coefficients[4] > 0
    assert coefficients[3] == (0 if kind == "best" else -coefficients[4])


@pytest.mark.parametrize("name", HEADS)
def test_the_order_of_siblings_does_not_matter(name: str) -> None:
    rng, head = np.random.default_rng(1), HEADS[name]
    d, rewards = torch.from_numpy(rng.standard_normal(12)), torch.from_numpy(rng.integers(0, 2, 12).astype(float))
    groups, order = torch.from_numpy(np.repeat([5, 1], 6)), torch.from_numpy(rng.permutation(12))
    straight = head.ours(d, rewards, groups, **head.options)
    shuffled = head.ours(d[order], rewards[order], groups[order], **head.options)
    for a, b in zip(straight, shuffled, strict=True):
        assert_close(a[order], b)


@pytest.mark.parametrize("name", HEADS)
def test_an_empty_batch_and_extreme_log_ratios(name: str) -> None:
    head, none = HEADS[name], torch.zeros(0)
    assert [len(x) for x in head.ours(none, none, none.long(), **head.options)] == [0, 0]
    far, rewards = torch.tensor([-5e3, 5e3]), torch.tensor([1.0, 0.0])
    for result in head.ours(far, rewards, torch.zeros(2).long(), **head.options):
        assert torch.isfinite(result).all()


def test_senseless_settings_are_refused() -> None:
    x, g = torch.zeros(2), torch.zeros(2).long()
    with pytest.raises(ValueError, match="allowed: group, mean, vstar"):
        regress(x, x, g, beta=1.0, target="tba")
    with pytest.raises(ValueError, match="allowed: dpo, ipo, best"):
        pair(x, x, g, beta=1.0, kind="orpo")
    with pytest.raises(ValueError, match="beta"):
        regress(x, x, g, beta=0.0, target="group")
    with pytest.raises(ValueError, match="beta"):
        pair(x, x, g, beta=0.0, kind="dpo")
