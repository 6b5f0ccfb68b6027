"""One token whose ratio is beyond reason is never the whole update, and a ratio within reason is left as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrlhf.algorithms.coefficients import one
from asyncrlhf.algorithms.kl import kl_estimate, kl_loss
from tests.unit.algorithms.batches import RaggedBatch, gradient, ragged_batch
from tests.unit.algorithms.cases import CASES, Case, run

BOUND = 100.0
BELOW = ("prox", "mu", "target", "ref")  # what stands below a ratio
BY_PRODUCT = {"proximal_rloo", "topr", "vespo", "seq_mask", "vcpo", "decoupled, product truncate"}


def leaf(batch: RaggedBatch) -> torch.Tensor:
    return torch.from_numpy(batch.theta.copy()).requires_grad_()


def with_an_outlier(seed: int, case: Case) -> tuple[RaggedBatch, int] | None:
    """A batch in which a token with A < 0 has a log-ratio of +100 to every other policy, and where it lies."""
    batch = ragged_batch(seed, min_sequences=3, max_sequences=6)
    for token in np.flatnonzero(batch.mask):
        moved = {name: getattr(batch, name).copy() for name in BELOW}
        for name in BELOW:
            moved[name][token] = batch.theta[token] - 100.0
        changed = replace(batch, **moved)
        if case.gain.ours(changed)[token] < -1e-3:
            return changed, int(token)
    return None


@pytest.mark.parametrize("name", CASES)
def test_a_log_ratio_of_100_is_not_the_whole_update(name: str) -> None:
    """Against plain -A log pi: no token weighs more than the bound times the largest behavior weight of these cases."""
    case, worst = CASES[name], 0.0
    for seed in range(12):
        found = with_an_outlier(seed, case)
        if found is None:
            continue
        batch, token = found
        theta = leaf(batch)
        plain = gradient(run(Case(case.paper, one(), case.gain, aggregate=case.aggregate), batch, theta).loss, theta)
        assert plain[token] != 0
        held = gradient(run(case, batch, theta, ratio_bound=BOUND).loss, theta)
        some = plain != 0
        worst = max(worst, float((np.abs(held)[some] / np.abs(plain)[some]).max()))
    assert 0 < worst <= 2.0 * BOUND


def test_the_bound_acts_where_it_must() -> None:
    """Guards the test above: these have no bound of their own on that side."""
    for name in ("ppo", "grpo", "grpo_mu", "dapo", "proximal_rloo", "impact", "m2po", "sat", "opsm", "reinforce_pp"):
        found = with_an_outlier(0, CASES[name]) or with_an_outlier(1, CASES[name])
        assert found is not None
        batch, token = found
        theta = leaf(batch)
        free = gradient(run(CASES[name], batch, theta).loss, theta)
        held = run(CASES[name], batch, theta, ratio_bound=BOUND)
        assert abs(free[token]) > 1e6 * abs(gradient(held.loss, theta)[token]) > 0, name
        assert held.clipped[token] and float(held.coefficient[token]) == BOUND


@pytest.mark.parametrize("name", CASES)
def test_ratios_up_to_20_are_left_as_they_are(name: str) -> None:
    """DPPO's 20 is the widest published bound. Equal bit for bit."""
    for seed in range(10):
        batch = ragged_batch(seed, min_sequences=2)
        rng, width = np.random.default_rng(seed), np.log(20.0) / (7 if name in BY_PRODUCT else 1)
        prox = batch.theta + rng.uniform(-width, width, len(batch.mask))
        target = batch.theta + rng.uniform(-width, width, len(batch.mask))
        near = replace(batch, prox=prox, target=target, mu=prox + rng.uniform(-width, width, len(batch.mask)))
        if CASES[name].anchor in ("mu", "impact", None):
            near = replace(near, mu=batch.theta + rng.uniform(-width, width, len(batch.mask)))
        theta = leaf(near)
        free, held = run(CASES[name], near, theta), run(CASES[name], near, theta, ratio_bound=BOUND)
        np.testing.assert_array_equal(gradient(held.loss, theta), gradient(free.loss, theta))
        assert torch.equal(held.clipped, free.clipped)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_in_the_loss_is_bounded_too(estimator: str) -> None:
    """By either of its ratios, pi / anchor and ref / pi, and pulls the same way as without a bound."""
    mask, ids = torch.ones(1, dtype=torch.bool), torch.zeros(1).long()

    def pull(to_anchor: float, to_ref: float, bound: float) -> float:
        theta = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
        anchor, ref = theta.detach() - to_anchor, theta.detach() - to_ref
        loss = kl_loss(
            theta, ref, anchor, mask, ids, estimator=estimator, normaliser=1.0, ratio_bound=bound
        )  # fmt: skip
        return float(gradient(loss, theta)[0])

    for to_anchor, to_ref in ((100.0, 0.5), (100.0, -0.5), (0.0, -100.0), (0.1, -100.0), (8.0, -3.0)):
        held, free = pull(to_anchor, to_ref, BOUND), pull(to_anchor, to_ref, np.inf)
        assert abs(held) <= 2 * BOUND * max(1.0, abs(to_ref)), (to_anchor, to_ref)
        assert np.sign(held) == np.sign(free)
    inside = np.log(20.0)
    for to_anchor, to_ref in np.random.default_rng(0).uniform(-inside, inside, (50, 2)):
        assert pull(to_anchor, to_ref, BOUND) == pull(to_anchor, to_ref, np.inf)


def test_k3_goes_on_along_its_tangent() -> None:
    ones = torch.ones(2, dtype=torch.bool)
    theta = torch.tensor([-np.log(100.0), -50.0], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(theta, torch.zeros(2).double(), ones, estimator="k3", ratio_bound=BOUND)
    np.testing.assert_allclose(found.detach()[0], 100 - 1 - np.log(100.0))
    np.testing.assert_allclose(gradient(found.sum(), theta), [-99.0, -99.0])
    step = theta.detach()[0] - theta.detach()[1]
    np.testing.assert_allclose((found[1] - found[0]).detach(), 99 * step)
