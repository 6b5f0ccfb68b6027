"""Facts about expectations, by enumerating every outcome: which corrections and KL terms are exact, which are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrlhf.algorithms.advantages import batch_mean
from asyncrlhf.algorithms.coefficients import cap, clip, one, signed
from asyncrlhf.algorithms.gates import GateInputs, binary_kl_gate
from asyncrlhf.algorithms.kl import kl_estimate, kl_loss
from asyncrlhf.algorithms.losses import policy_loss
from asyncrlhf.algorithms.masked import moments
from asyncrlhf.algorithms.weights import behavior_weight
from tests.numeric import assert_close

V = 3
INF = float("inf")


class TwoTokenPolicy:
    """A table policy over two tokens from an alphabet of V; its logits [V + V * V] are a leaf."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.from_numpy(np.random.default_rng(seed).standard_normal(V + V * V)).requires_grad_()

    def token_logprobs(self) -> Tensor:
        """Log-probs of all V * V sequences, packed: [2 V V]."""
        first = self.logits[:V].log_softmax(0)
        second = self.logits[V:].view(V, V).log_softmax(1)
        return torch.stack((first[:, None].expand(V, V), second), dim=-1).reshape(-1)

    def sequence_probs(self) -> Tensor:
        return self.token_logprobs().view(-1, 2).sum(1).exp()


PI, MU, PROX = TwoTokenPolicy(0), TwoTokenPolicy(1), TwoTokenPolicy(2)
REWARDS = torch.from_numpy(np.random.default_rng(3).standard_normal(V * V))
MASK = torch.ones(2 * V * V, dtype=torch.bool)
IDS = torch.arange(V * V).repeat_interleave(2)


def grad(scalar: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, PI.logits)[0]


def expected_gradient(rewards: Tensor, sampler: TwoTokenPolicy, anchor: Tensor | None, **switches: Any) -> Tensor:
    """E over the sampler's sequences of the kernel's gradient: each sequence once, weighted by its probability."""
    return grad(
        policy_loss(
            PI.token_logprobs(),
            anchor,
            rewards[IDS],
            MASK,
            IDS,
            aggregate="seq_sum",
            normaliser=1.0,
            sample_weights=sampler.sequence_probs().detach(),
            **switches,
        ).loss
    )


def true_gradient(rewards: Tensor) -> Tensor:
    return grad(-(PI.sequence_probs() * rewards).sum())


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def assert_same(found: Tensor, truth: Tensor) -> None:
    assert_close(found, truth, rtol=0.0, of_largest=1e-9)


def full_weight(level: str) -> dict[str, Any]:
    """Coefficient one under an uncut behavior weight, theta being the proximal policy."""
    weight, _ = behavior_weight(PI.token_logprobs(), MU.token_logprobs(), MASK, IDS, level=level, high=INF)
    return {"anchor": None, "coefficient": one(), "weight": weight}


def full_ratio(level: str) -> dict[str, Any]:
    """An uncut ratio on the behavior policy."""
    return {"anchor": MU.token_logprobs(), "coefficient": cap(0.0, INF), "level": level}


def through_proximal(level: str) -> dict[str, Any]:
    """Decoupled: pi / prox in the ratio, prox / mu in the weight."""
    weight, _ = behavior_weight(PROX.token_logprobs(), MU.token_logprobs(), MASK, IDS, level=level, high=INF)
    return {"anchor": PROX.token_logprobs(), "coefficient": cap(0.0, INF), "level": level, "weight": weight}


@pytest.mark.parametrize("correction", [full_weight, full_ratio, through_proximal])
def test_product_level_is_exact_and_other_levels_are_biased(correction: Any) -> None:
    truth = true_gradient(REWARDS)
    assert_same(expected_gradient(REWARDS, MU, **correction("prod")), truth)
    for level in ("token", "geo"):
        assert error(expected_gradient(REWARDS, MU, **correction(level)), truth) > 0.05
    uncorrected = expected_gradient(REWARDS, MU, anchor=None, coefficient=one())
    assert error(uncorrected, truth) > 0.05


def test_bounded_ratios_are_biased_but_on_policy_exact() -> None:
    """What keeps variance down costs bias: CISPO's cap, PPO's clip, TOPR's taper, even on whole sequences."""
    for rule in (cap(0.0, 1.5), clip(0.2, 0.2), signed()):
        switches: dict[str, Any] = {"coefficient": rule, "level": "prod"}
        off = expected_gradient(REWARDS, MU, anchor=MU.token_logprobs(), **switches)
        assert error(off, true_gradient(REWARDS)) > 0.05
        on = expected_gradient(REWARDS, PI, anchor=PI.token_logprobs().detach(), **switches)
        assert_same(on, true_gradient(REWARDS))


def test_on_policy_needs_no_correction() -> None:
    found = expected_gradient(REWARDS, PI, anchor=None, coefficient=one())
    assert_same(found, true_gradient(REWARDS))


def test_a_baseline_is_free_only_under_uncut_weights() -> None:
    """A token-level weight is biased, yet a baseline stays free under it: given the prefix, w mu is pi."""
    cut, _ = behavior_weight(PI.token_logprobs(), MU.token_logprobs(), MASK, IDS, level="prod", high=1.0)
    cases: dict[str, tuple[dict[str, Any], bool]] = {
        "product": (full_weight("prod"), True),
        "token": (full_weight("token"), True),
        "geometric": (full_weight("geo"), False),
        "none": ({"anchor": None, "coefficient": one()}, False),
        "product, truncated": ({"anchor": None, "coefficient": one(), "weight": cut}, False),
    }
    for name, (switches, free) in cases.items():
        moved, found = (expected_gradient(r, MU, **switches) for r in (REWARDS - 0.7, REWARDS))
        if free:
            assert_same(moved, found)
        else:
            assert error(moved, found) > 0.01, name


@pytest.mark.parametrize("sampler", [PI, MU])
def test_the_mean_of_a_batch_takes_a_share_of_one_rollout(sampler: TwoTokenPolicy) -> None:
    """A rollout's own reward is in the mean: batches of B give 1 - 1 / B of the gradient, exactly under uncut weights
    of whole answers; a gate of sequences is biased."""

    def expected(delta: float) -> Tensor:
        mask, ids, total = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), torch.zeros(())
        policy, behavior = PI.token_logprobs().view(-1, 2), sampler.token_logprobs().detach().view(-1, 2)
        chances = sampler.sequence_probs().detach()
        for pair in torch.cartesian_prod(torch.arange(V * V), torch.arange(V * V)):
            rewards = REWARDS[pair]
            gains = batch_mean(rewards, moments(rewards, mask[:2]))[ids]
            theta, mu = policy[pair].flatten(), behavior[pair].flatten()
            loss = policy_loss(
                theta, mu, gains, mask, ids, coefficient=cap(0.0, INF), level="prod", aggregate="seq_sum",
                normaliser=2.0, gate=binary_kl_gate(GateInputs(theta, mu, mu, gains, mask, ids), delta),
            ).loss  # fmt: skip
            total = total + chances[pair].prod() * loss
        return grad(total)

    assert_same(expected(INF), true_gradient(REWARDS) / 2)
    assert (error(expected(0.05), true_gradient(REWARDS) / 2) > 0.05) == (sampler is MU)


# One token: the KL of a categorical policy to a reference, from samples of mu.

REF = TwoTokenPolicy(4)


def first_token(policy: TwoTokenPolicy) -> Tensor:
    return policy.logits[:V].log_softmax(0)


def expected_kl_gradient(estimator: str, sampler: TwoTokenPolicy, *, weighted: bool, decoupled: bool = False) -> Tensor:
    """E over the sampler's tokens of the KL term's gradient: each token is a sequence, weighted by its probability."""
    mask, ids = torch.ones(V, dtype=torch.bool), torch.arange(V)
    behavior = first_token(sampler)
    anchor = first_token(PROX) if decoupled else behavior
    weight = behavior_weight(anchor, behavior, mask, ids, high=INF)[0] if decoupled else None
    return grad(
        kl_loss(
            first_token(PI),
            first_token(REF),
            anchor,
            mask,
            ids,
            estimator=estimator,
            importance_weighted=weighted,
            weight=weight,
            normaliser=1.0,
            sample_weights=behavior.exp().detach(),
        )
    )


def true_kl_gradient(*, reverse: bool) -> Tensor:
    """Of KL(pi || ref), or of KL(ref || pi) when not ``reverse``."""
    pi, ref = first_token(PI), first_token(REF).detach()
    return grad((pi.exp() * (pi - ref)).sum() if reverse else (ref.exp() * (ref - pi)).sum())


def test_on_policy_gradients_of_the_plain_estimators() -> None:
    reverse, forward = true_kl_gradient(reverse=True), true_kl_gradient(reverse=False)
    assert_close(expected_kl_gradient("k1", PI, weighted=False), torch.zeros_like(PI.logits))
    assert_same(expected_kl_gradient("k2", PI, weighted=False), reverse)
    assert_same(expected_kl_gradient("k3", PI, weighted=False), forward)
    assert error(forward, reverse) > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("sampler", [PI, MU])
def test_importance_weighted_kl_is_exact(estimator: str, decoupled: bool, sampler: TwoTokenPolicy) -> None:
    found = expected_kl_gradient(estimator, sampler, weighted=True, decoupled=decoupled)
    assert_same(found, true_kl_gradient(reverse=True))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("sampler", [PI, MU])
def test_the_forward_kl_is_exact(decoupled: bool, sampler: TwoTokenPolicy) -> None:
    found = expected_kl_gradient("forward", sampler, weighted=True, decoupled=decoupled)
    assert_same(found, true_kl_gradient(reverse=False))
    assert error(found, true_kl_gradient(reverse=True)) > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unweighted_kl_is_wrong_off_policy(estimator: str) -> None:
    assert error(expected_kl_gradient(estimator, MU, weighted=False), true_kl_gradient(reverse=True)) > 0.05


def test_a_detached_ratio_is_right_for_k2_only() -> None:
    """sg(r) k1 has no gradient at all, sg(r) k3 that of the other KL."""

    def expected(estimator: str) -> Tensor:
        policy, behavior, mask = first_token(PI), first_token(MU).detach(), torch.ones(V, dtype=torch.bool)
        ratio = (policy - behavior).exp().detach()
        return grad((behavior.exp() * ratio * kl_estimate(policy, first_token(REF), mask, estimator=estimator)).sum())

    assert_close(expected("k1"), torch.zeros_like(PI.logits))
    assert_same(expected("k2"), true_kl_gradient(reverse=True))
    assert_same(expected("k3"), true_kl_gradient(reverse=False))
    assert error(expected("k3"), true_kl_gradient(reverse=True)) > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_without_an_anchor_the_weighted_kl_is_exact_on_policy(estimator: str) -> None:
    mask, ids = torch.ones(V, dtype=torch.bool), torch.arange(V)
    policy = first_token(PI)
    loss = kl_loss(
        policy, first_token(REF), None, mask, ids,
        estimator=estimator, normaliser=1.0, sample_weights=policy.exp().detach(),
    )  # fmt: skip
    assert_same(grad(loss), true_kl_gradient(reverse=True))
