"""The clip rules: how a ratio and an advantage become the detached coefficient of a token's policy gradient.

Each rule is a function of floats that returns a ``Coefficient``; a new rule is one more function in ``COEFFICIENTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class RatioFacts(NamedTuple):
    """What a rule may look at; every tensor is [T] and detached, and zero (ratio: one) outside the mask."""

    ratio: Tensor  # pi_theta / pi_anchor at the loss's level
    advantages: Tensor
    policy_logprobs: Tensor
    anchor_logprobs: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor


# Gives (coefficient [T], clipped [T] bool: the tokens on which the rule acted).
Coefficient = Callable[[RatioFacts], tuple[Tensor, Tensor]]


def one() -> Coefficient:
    """c = 1: plain REINFORCE; the ratio is not looked at."""

    def rule(facts: RatioFacts) -> tuple[Tensor, Tensor]:
        return torch.ones_like(facts.ratio), torch.zeros_like(facts.loss_mask)

    return rule


def clip(eps_low: float, eps_high: float, dual: float = 0.0) -> Coefficient:
    """The gradient of PPO's min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (1707.06347): r, or 0 where the clip holds.

    ``dual`` > 1 also drops tokens with A < 0 and r > dual (dual clip, 1912.09729); 0 is off.
    """
    if dual and dual <= 1:
        raise ValueError(f"dual_clip={dual} would drop tokens inside the clip range; allowed: 0 (off) or > 1.")

    def rule(facts: RatioFacts) -> tuple[Tensor, Tensor]:
        ratio, advantages = facts.ratio, facts.advantages
        too_far = (advantages > 0) & (ratio > 1 + eps_high) | (advantages < 0) & (ratio < 1 - eps_low)
        if dual:
            too_far = too_far | (advantages < 0) & (ratio > dual)
        return ratio.masked_fill(too_far, 0.0), too_far

    return rule


def cap(low: float, high: float) -> Coefficient:
    """c = clamp(r, low, high), never dropped (CISPO 2506.13585, AIPO 2505.24034); bounds on the ratio itself."""

    def rule(facts: RatioFacts) -> tuple[Tensor, Tensor]:
        return facts.ratio.clamp(low, high), (facts.ratio < low) | (facts.ratio > high)

    return rule


def band(low: float, high: float) -> Coefficient:
    """c = r where low < r < high, else 0, whatever the sign of A (SAO 2607.07508); bounds on the ratio itself."""

    def rule(facts: RatioFacts) -> tuple[Tensor, Tensor]:
        outside = (facts.ratio <= low) | (facts.ratio >= high)
        return facts.ratio.masked_fill(outside, 0.0), outside

    return rule


COEFFICIENTS: dict[str, Callable[..., Coefficient]] = {"one": one, "clip": clip, "cap": cap, "band": band}
