"""KL to a reference policy: the k1, k2, k3 estimators and the importance-weighted loss.

In the reward only k1 is a penalty: each token's (PPO of 1909.08593), or a sequence's sum (RLOO of 2402.14740). As a
reward, an estimator f has the score-function gradient E[f grad log pi]: k1's is that of KL(pi || ref); k3's is that of
KL(pi || ref) - KL(ref || pi), which nearly cancels, so that next to nothing holds the policy; k2's is close to neither.

Gradients of the estimators as losses, checked by enumeration in the tests (pi = policy, mu = the sampler): on-policy,
k1 has none in expectation, k2 gives that of KL(pi || ref), k3 that of KL(ref || pi). Off-policy, r k1 and r k3 with
r = pi / mu *not* detached and sg(r) k2 give that of KL(pi || ref); plain k2 and sg(r) k3 are wrong. ``forward``,
sg(ref / mu) (log ref - log pi), gives that of KL(ref || pi); ``jsd``, sg(r log(pi / m)) log pi / 2 with
m = (pi + ref) / 2, that of the Jensen-Shannon divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asyncrlhf.algorithms.aggregate import aggregate_loss
from asyncrlhf.algorithms.masked import masked_values
from asyncrlhf.algorithms.weights import MAX_LOG_RATIO, ratio_of


def _k3(difference: Tensor, ratio_bound: float) -> Tensor:
    held = (-difference).clamp(max=min(MAX_LOG_RATIO, math.log(ratio_bound)))
    # Beyond the bound the exponential continues as its tangent: its gradient is bounded and keeps its direction.
    return held.exp() * (1 - difference - held) - 1 + difference


ESTIMATORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "k1": lambda d, _: d,
    "k2": lambda d, _: 0.5 * d.square(),
    "k3": _k3,
    "forward": lambda d, _: -d,
    # d JSD / d pi = log(pi / m) / 2 with the mixture m = (pi + ref) / 2
    "jsd": lambda d, _: 0.5 * (math.log(2) - torch.nn.functional.softplus(-d)).detach() * d,
}


def kl_estimate(
    policy_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, *, estimator: str, ratio_bound: float = math.inf
) -> Tensor:
    """KL(policy || ref) a token, estimated on tokens that the policy sampled: [T], zero outside the mask.

    ``estimator``: k1 = log pi - log ref, k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1 (Schulman, 2020), forward = -k1 and
    jsd for ``kl_loss``. Gradient flows to ``policy_logprobs``. ``ratio_bound``: k3 is linear where ref / pi is above.
    """
    difference = masked_values(policy_logprobs, loss_mask) - masked_values(ref_logprobs.detach(), loss_mask)
    return ESTIMATORS[estimator](difference, ratio_bound)


def kl_loss(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    anchor_logprobs: Tensor | None,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    estimator: str,
    normaliser: Tensor | float,
    importance_weighted: bool = True,
    weight: Tensor | None = None,
    aggregate: str = "token",
    sample_weights: Tensor | None = None,
    ratio_bound: float = math.inf,
) -> Tensor:
    """The KL term of the loss, before its coefficient beta: 0-dim.

    With ``importance_weighted`` each token's estimate is multiplied by r = weight * exp(policy - anchor), the ratio of
    the policy to the sampler of the token. Exact for each token when ``anchor_logprobs`` is the behavior policy and
    ``weight`` is None, or when the anchor is the proximal policy and ``weight`` (detached) is pi_prox / mu, uncut.
    Anchor None stands for the policy itself: on-policy data. Gradient flows through exp(policy - anchor) for k1 and
    k3; k2 and jsd need it detached, as does forward, whose ratio is exp(ref - anchor). ``ratio_bound``: the ratio, in
    value and gradient, and k3's ref / policy are held at most at it. Other arguments as in ``losses.policy_loss``.
    """
    policy = masked_values(policy_logprobs, loss_mask)
    per_token = kl_estimate(policy, ref_logprobs, loss_mask, estimator=estimator, ratio_bound=ratio_bound)
    if importance_weighted:
        anchor = policy if anchor_logprobs is None else masked_values(anchor_logprobs, loss_mask)
        counted = masked_values(ref_logprobs, loss_mask) if estimator == "forward" else policy
        ratio = ratio_of((counted - anchor).detach(), ratio_bound) * (policy - policy.detach()).exp()
        if weight is not None:
            ratio = ratio * masked_values(weight.detach(), loss_mask)
        per_token = per_token * (ratio.detach() if estimator in ("k2", "forward", "jsd") else ratio)
    return aggregate_loss(
        per_token, loss_mask, sequence_ids, how=aggregate, normaliser=normaliser, sample_weights=sample_weights
    )
