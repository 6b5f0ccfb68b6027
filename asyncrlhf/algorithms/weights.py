"""Importance ratios at token and sequence level, and the weight that corrects for the behavior policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrlhf.algorithms.masked import masked_mean, masked_values, segment_total, sequence_lengths

# exp(20) is 5e8: a ratio beyond it is a failure whatever it is, and below it no product overflows float32.
MAX_LOG_RATIO = 20.0


LEVELS = ("token", "geo", "prod")


def log_ratio(numerator: Tensor, denominator: Tensor, loss_mask: Tensor, sequence_ids: Tensor, level: str) -> Tensor:
    """Detached log-ratio of two policies at ``level``: [T], zero outside the mask.

    Args:
        numerator, denominator: [T] log-probs.
        level: ``token``; ``geo``, the mean over the sequence's masked tokens (GSPO, 2507.18071); ``prod``, their sum:
            the exact sequence ratio. Sequence levels give every masked token of a sequence the same number.
    """
    per_token = masked_values((numerator - denominator).detach(), loss_mask)
    if level == "token":
        return per_token
    total = segment_total(per_token, sequence_ids)
    mean = total / sequence_lengths(loss_mask, sequence_ids)
    return masked_values({"geo": mean, "prod": total}[level], loss_mask)


def ratio_of(log_ratios: Tensor, bound: float = math.inf) -> Tensor:
    """``exp`` of log-ratios clamped to +-``MAX_LOG_RATIO``, so that a ratio times a zero advantage is zero, not NaN.

    ``bound``: the largest ratio, if smaller.
    """
    return log_ratios.clamp(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, math.log(bound))).exp()


def behavior_weight(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float = 0.0,
    high: float = math.inf,
    ratio_bound: float = math.inf,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The detached weight w = pi_prox / mu of every token: ([T], what was cut).

    Args:
        proximal_logprobs, behavior_logprobs: [T].
        mode: ``none`` gives 1 everywhere (no correction); ``truncate`` gives clamp(w, low, high) (TIS);
            ``mask`` gives w where low <= w <= high and 0 elsewhere (MIS, IcePop; decoupled PPO of 2505.24298: high 5).
        ratio_bound: the largest weight that is given, whatever the mode and ``high``.

    The weight is 0 outside the mask. The second value holds 0-dim tensors over masked tokens: ``behavior_weight_mean``
    (after cutting), ``behavior_truncated_fraction``, ``behavior_masked_fraction``. A rejected token stays in the loss
    mask: it keeps its share of the normaliser.
    """
    raw = ratio_of(log_ratio(proximal_logprobs, behavior_logprobs, loss_mask, sequence_ids, level))
    nothing = torch.zeros_like(loss_mask)
    cut = nothing if mode == "none" else (raw < low) | (raw > high)
    held = {"none": torch.ones_like(raw), "truncate": raw.clamp(low, high), "mask": raw.masked_fill(cut, 0.0)}
    weight = held[mode].clamp(max=ratio_bound)
    return masked_values(weight, loss_mask), {
        "behavior_weight_mean": masked_mean(weight, loss_mask),
        "behavior_truncated_fraction": masked_mean((cut if mode == "truncate" else nothing).to(raw.dtype), loss_mask),
        "behavior_masked_fraction": masked_mean((cut if mode == "mask" else nothing).to(raw.dtype), loss_mask),
    }


def interpolated_proximal(policy_logprobs: Tensor, behavior_logprobs: Tensor, version_lag: Tensor) -> Tensor:
    """The proximal policy without a forward pass: mu + alpha (theta - mu), alpha = (d - 1) / d: [T], detached.

    A-3PO (2512.06547). ``version_lag`` d [T]: versions between a token's birth and now; below 1 it counts as 1, which
    gives mu itself.
    """
    lag = version_lag.clamp(min=1).to(behavior_logprobs.dtype)
    return behavior_logprobs.lerp(policy_logprobs.detach().to(behavior_logprobs.dtype), (lag - 1) / lag)


def target_anchor(target_logprobs: Tensor, behavior_logprobs: Tensor, ratio_cap: float) -> Tensor:
    """The anchor under which pi / anchor is clamp(mu / target, 0, ``ratio_cap``) pi / mu: [T], detached.

    It is the larger of target and mu / ``ratio_cap``: the ratio that IMPACT (1912.00167) clips, with its rho for the
    cap, as in RLlib's APPO (``rllib/algorithms/appo/torch/appo_torch_learner.py``).
    """
    return torch.maximum(target_logprobs, behavior_logprobs - math.log(ratio_cap)).detach()
