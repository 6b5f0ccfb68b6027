"""The losses: one policy-gradient kernel with switches, and the clipped value loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrlhf.algorithms.aggregate import aggregate_loss
from asyncrlhf.algorithms.coefficients import Coefficient, RatioFacts
from asyncrlhf.algorithms.masked import masked_values
from asyncrlhf.algorithms.weights import log_ratio, ratio_of


class PolicyLoss(NamedTuple):
    """``loss`` is 0-dim and carries the gradient; the rest is [T] and detached, for the diagnostics."""

    loss: Tensor
    coefficient: Tensor
    clipped: Tensor  # bool


def policy_loss(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    coefficient: Coefficient,
    normaliser: Tensor | float,
    level: str = "token",
    aggregate: str = "token",
    weight: Tensor | None = None,
    sample_weights: Tensor | None = None,
    gate: Tensor | None = None,
    ratio_bound: float = math.inf,
) -> PolicyLoss:
    """Every ratio-style policy loss: l_t = -sg(w_t c(r_t, A_t)) A_t theta_t, summed and divided by ``normaliser``.

    Args:
        policy_logprobs: [T] log pi_theta, with gradient.
        anchor_logprobs: [T] the ratio's denominator: proximal or behavior policy, or None for theta itself (r = 1).
        advantages: [T].
        loss_mask, sequence_ids: [T]. Sequences are whole: a level or ``seq_mean`` looks at all of a sequence's tokens.
        coefficient: the clip rule, one of ``coefficients.COEFFICIENTS``.
        normaliser: ``aggregate.normaliser_count`` added over all microbatches and ranks of the optimizer update.
        level: ``token``, ``geo`` or ``prod``, see ``weights.log_ratio``.
        weight: [T] ``weights.behavior_weight``; 1 when None.
        sample_weights: [N] multiplies whole sequences, without changing the normaliser; 1 when None.
        gate: [T] bool, see ``gates``: a token that is not kept gets coefficient 0 and counts as clipped, without
            changing the normaliser; all are kept when None.
        ratio_bound: the largest coefficient c; a token that is held there counts as clipped. One whose log-ratio is
            +100 with A < 0 would be the whole update under any rule that does not bound that side, such as PPO's clip.

    Only the gradient is meant. Of the value: theta enters as theta - sg(theta) + 1, so that the loss reads
    -w c A, which is PPO's surrogate on every token that is not clipped. Losses of microbatches add up to the full
    batch's, value and gradient. A data-parallel wrapper that averages gradients wants it times the number of ranks.
    """
    policy = masked_values(policy_logprobs, loss_mask)
    fixed_policy = policy.detach()
    anchor = fixed_policy if anchor_logprobs is None else masked_values(anchor_logprobs.detach(), loss_mask)
    gains = masked_values(advantages.detach(), loss_mask)
    ratio = ratio_of(log_ratio(fixed_policy, anchor, loss_mask, sequence_ids, level))
    coefficients, clipped = coefficient(RatioFacts(ratio, gains, fixed_policy, anchor, loss_mask, sequence_ids))
    coefficients, clipped = coefficients.clamp(max=ratio_bound), clipped | (coefficients > ratio_bound)
    if gate is not None:
        coefficients, clipped = coefficients.masked_fill(~gate, 0.0), clipped | ~gate
    scale = gains * coefficients
    if weight is not None:
        scale = scale * masked_values(weight.detach(), loss_mask)
    per_token = -scale * (policy - fixed_policy + 1)
    loss = aggregate_loss(
        per_token, loss_mask, sequence_ids, how=aggregate, normaliser=normaliser, sample_weights=sample_weights
    )
    return PolicyLoss(loss, masked_values(coefficients, loss_mask), clipped & loss_mask)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip: float,
    normaliser: Tensor | float,
    aggregate: str = "token",
    sample_weights: Tensor | None = None,
) -> Tensor:
    """1/2 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), aggregated like the policy loss: 0-dim.

    ``values`` [T] carries the gradient; ``old_values`` and ``returns`` [T] are those the batch came with.
    """
    current = masked_values(values, loss_mask)
    before, target = (masked_values(x.detach(), loss_mask) for x in (old_values, returns))
    held = torch.maximum(torch.minimum(current, before + clip), before - clip)
    per_token = 0.5 * torch.maximum((current - target).square(), (held - target).square())
    return aggregate_loss(
        per_token, loss_mask, sequence_ids, how=aggregate, normaliser=normaliser, sample_weights=sample_weights
    )
