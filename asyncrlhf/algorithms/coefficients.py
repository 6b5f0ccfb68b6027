"""The clip rules: how a ratio and an advantage become the detached coefficient of a token's policy gradient.

Called with its bounds, each rule returns a ``Coefficient``; a new rule is one more function in ``COEFFICIENTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor

from asyncrlhf.algorithms.weights import log_ratio, ratio_of


class RatioFacts(NamedTuple):
    """The inputs of a rule; every tensor is [T] and detached, and zero (ratio: one) outside the mask."""

    ratio: Tensor  # pi_theta / pi_anchor at the loss's level
    advantages: Tensor
    policy_logprobs: Tensor
    anchor_logprobs: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor


# Returns (coefficient [T], clipped [T] bool: the tokens on which the rule acted).
Coefficient = Callable[[RatioFacts], tuple[Tensor, Tensor]]


Bounds = ParamSpec("Bounds")


def _of_bounds(rule: Callable[Concatenate[RatioFacts, Bounds], tuple[Tensor, Tensor]]) -> Callable[Bounds, Coefficient]:
    """The rule as a function of its bounds alone."""

    @wraps(rule)
    def bound(*bounds: Bounds.args, **named: Bounds.kwargs) -> Coefficient:
        return lambda facts: rule(facts, *bounds, **named)

    return bound


@_of_bounds
def one(facts: RatioFacts) -> tuple[Tensor, Tensor]:
    """c = 1: plain REINFORCE, without the ratio."""
    return torch.ones_like(facts.ratio), torch.zeros_like(facts.loss_mask)


@_of_bounds
def clip(facts: RatioFacts, eps_low: float, eps_high: float, dual: float = 0.0) -> tuple[Tensor, Tensor]:
    """The gradient of PPO's min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (1707.06347): r, or 0 where the clip
    applies.

    ``dual`` > 1 also drops tokens with A < 0 and r > dual (dual clip, 1912.09729); 0 is off.
    """
    if dual and dual <= 1:
        raise ValueError(f"dual_clip={dual} would drop tokens inside the clip range; allowed: 0 (off) or > 1.")
    ratio, advantages = facts.ratio, facts.advantages
    too_far = (advantages > 0) & (ratio > 1 + eps_high) | (advantages < 0) & (ratio < 1 - eps_low)
    if dual:
        too_far = too_far | (advantages < 0) & (ratio > dual)
    return ratio.masked_fill(too_far, 0.0), too_far


@_of_bounds
def cap(facts: RatioFacts, low: float, high: float) -> tuple[Tensor, Tensor]:
    """c = clamp(r, low, high), never dropped (CISPO 2506.13585, AIPO 2505.24034); bounds on the ratio itself."""
    return facts.ratio.clamp(low, high), (facts.ratio < low) | (facts.ratio > high)


@_of_bounds
def band(facts: RatioFacts, low: float, high: float) -> tuple[Tensor, Tensor]:
    """c = r where low < r < high, else 0, whatever the sign of A (SAO 2607.07508); bounds on the ratio itself."""
    outside = (facts.ratio <= low) | (facts.ratio >= high)
    return facts.ratio.masked_fill(outside, 0.0), outside


@_of_bounds
def signed(facts: RatioFacts, low: float = 0.0, high: float = 1.0) -> tuple[Tensor, Tensor]:
    """c = 1 where A >= 0, clamp(r, low, high) where A < 0 (TOPR 2503.14286, on the sequence's product ratio)."""
    negative = facts.advantages < 0
    held = facts.ratio.clamp(low, high)
    return torch.where(negative, held, 1.0), negative & (held != facts.ratio)


@_of_bounds
def soft(facts: RatioFacts, tau_positive: float, tau_negative: float) -> tuple[Tensor, Tensor]:
    """The gradient of SAPO's (4 / tau) sigmoid(tau (r - 1)) A (2511.20347): 4 r s (1 - s), s the sigmoid.

    tau is ``tau_positive`` where A > 0. Nothing is dropped, so that no token counts as clipped.
    """
    excess = facts.ratio - 1
    x = torch.where(facts.advantages > 0, tau_positive * excess, tau_negative * excess)
    # 1 - sigmoid(x) is sigmoid(-x), without the cancellation.
    return 4 * facts.ratio * x.sigmoid() * (-x).sigmoid(), torch.zeros_like(facts.loss_mask)


@_of_bounds
def gamma(
    facts: RatioFacts, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float
) -> tuple[Tensor, Tensor]:
    """c = e^lambda r^k e^(-lambda r), r the sequence's product ratio (VESPO 2602.10693); 1 at r = 1.

    ``_positive`` where A >= 0. Nothing is dropped, so that no token counts as clipped.
    """
    log, excess = facts.ratio.log(), facts.ratio - 1
    positive = k_positive * log - lambda_positive * excess
    negative = k_negative * log - lambda_negative * excess
    return torch.where(facts.advantages >= 0, positive, negative).exp(), torch.zeros_like(facts.loss_mask)


@_of_bounds
def dprob(facts: RatioFacts, delta_low: float, delta_high: float, cap: float) -> tuple[Tensor, Tensor]:
    """c = min(r, cap), or 0 where the token's probability moved too far in A's direction (DPPO 2602.04879).

    Too far: A > 0 and pi - mu > ``delta_high``, or A < 0 and pi - mu < -``delta_low``. The anchor is mu.
    """
    moved, advantages = facts.policy_logprobs.exp() - facts.anchor_logprobs.exp(), facts.advantages
    too_far = (advantages > 0) & (moved > delta_high) | (advantages < 0) & (moved < -delta_low)
    return facts.ratio.clamp(max=cap).masked_fill(too_far, 0.0), too_far | (facts.ratio > cap)


@_of_bounds
def geoclip(facts: RatioFacts, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """The gradient of GMPO's s A (2507.20673) under ``level`` token and ``aggregate`` seq_mean: s, or 0 where clipped.

    s is the sequence's geometric mean of token ratios, after each log-ratio is clamped to ``eps_high`` where A > 0 and
    to -``eps_low`` where A < 0. The bounds are on the log-ratio. A is one number per sequence; with one per token, or
    under another aggregate, the result is not the gradient of GMPO's loss.
    """
    difference, advantages = facts.policy_logprobs - facts.anchor_logprobs, facts.advantages
    high, low = (advantages > 0) & (difference > eps_high), (advantages < 0) & (difference < -eps_low)
    held = torch.where(high, eps_high, torch.where(low, -eps_low, difference))
    mean = log_ratio(held, torch.zeros_like(held), facts.loss_mask, facts.sequence_ids, "geo")
    return ratio_of(mean).masked_fill(high | low, 0.0), high | low


COEFFICIENTS: dict[str, Callable[..., Coefficient]] = {
    rule.__name__: rule for rule in (one, clip, cap, band, signed, soft, gamma, dprob, geoclip)
}
