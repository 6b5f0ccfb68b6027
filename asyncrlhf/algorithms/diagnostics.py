"""Diagnostics of a training step: effective sample size, drift between policies, clipping, the critic's fit.

All functions take one rank's tokens and return statistics that add up over ranks (``algorithms/statistics.py``); they
are 0 where the mask is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrlhf.algorithms.gates import harmful
from asyncrlhf.algorithms.masked import masked_values, segment_sum
from asyncrlhf.algorithms.statistics import EffectiveSize, Largest, Mean, Percentile, Spread, Statistic
from asyncrlhf.algorithms.weights import ratio_of

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LAG_EDGES = (0, 1, 2, 4, 8)  # the largest lag of each bucket but the last

RETURN_NOISE = 1e-5
Found = dict[str, Statistic]


def weight_diagnostics(log_weights: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Found:
    """ESS of the behavior weights, from ``log_weights [T]`` = log(prox / mu) a token.

    ``ess``, ``ess_fraction``: over tokens. ``sequence_ess``, ``sequence_ess_fraction``: over the sequences' products.
    """
    kept = masked_values(log_weights.detach(), loss_mask)
    products = segment_sum(kept.double(), sequence_ids, len(kept))
    present = segment_sum(loss_mask.long(), sequence_ids, len(kept)) > 0
    return {
        "ess": EffectiveSize.over(kept, loss_mask, share=False),
        "ess_fraction": EffectiveSize.over(kept, loss_mask, share=True),
        "sequence_ess": EffectiveSize.over(products, present, share=False),
        "sequence_ess_fraction": EffectiveSize.over(products, present, share=True),
    }


def log_ratio_diagnostics(log_ratio: Tensor, loss_mask: Tensor, prefix: str) -> Found:
    """``log_ratio [T]`` a token: mean, and mean, 99th percentile and largest of its absolute value.

    Keys: ``{prefix}_log_ratio_mean``, ``_abs_mean``, ``_abs_p99`` (up to a bin of 1%), ``_abs_max``.
    """
    kept = masked_values(log_ratio.detach(), loss_mask)
    sizes = kept[loss_mask].abs()
    return {
        f"{prefix}_log_ratio_mean": Mean.over(kept, loss_mask),
        f"{prefix}_log_ratio_abs_mean": Mean.over(kept.abs(), loss_mask),
        f"{prefix}_log_ratio_abs_p99": Percentile.of_sizes(sizes, 0.99),
        f"{prefix}_log_ratio_abs_max": Largest.of(sizes),
    }


def kl_diagnostics(policy_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor, prefix: str) -> Found:
    """KL both ways between a policy and the policy that sampled the tokens; each term is >= 0, like k3's.

    With r = policy / sampler: ``{prefix}_kl`` estimates KL(sampler || policy) by r - 1 - log r, ``{prefix}_reverse_kl``
    estimates KL(policy || sampler) by r log r - r + 1. Also ``{prefix}_max_abs_dprob``: the largest change of a
    token's probability.
    """
    policy, sampler = (masked_values(x.detach(), loss_mask) for x in (policy_logprobs, sampler_logprobs))
    difference = policy - sampler
    ratio = ratio_of(difference)
    return {
        f"{prefix}_kl": Mean.over(ratio - 1 - difference, loss_mask),
        f"{prefix}_reverse_kl": Mean.over(ratio * difference - ratio + 1, loss_mask),
        f"{prefix}_max_abs_dprob": Largest.of((policy.exp() - sampler.exp()).abs()),
    }


def clip_diagnostics(clipped: Tensor, advantages: Tensor, loss_mask: Tensor) -> Found:
    """Share of tokens on which the clip rule acted: of all, of those with A > 0, of those with A < 0."""
    share = clipped.to(advantages.dtype)
    return {
        "clip_fraction": Mean.over(share, loss_mask),
        "clip_fraction_positive": Mean.over(share, loss_mask & (advantages > 0)),
        "clip_fraction_negative": Mean.over(share, loss_mask & (advantages < 0)),
    }


def harmful_second_moment(log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Statistic:
    """Mean (log r)^2 over the harmful tokens of ``gates.harmful``: the quantity that M2PO (2510.01161) bounds."""
    moved = masked_values(log_ratio.detach(), loss_mask)
    return Mean.over(moved.square(), harmful(moved, advantages, loss_mask))


def lag_diagnostics(version_lag: Tensor, loss_mask: Tensor) -> Found:
    """``version_lag [T]``, the policy's version less the token's version: its mean, 95th percentile and maximum.

    Keys: ``version_lag_mean``, ``version_lag_p95``, ``version_lag_max``.
    """
    return {
        "version_lag_mean": Mean.over(version_lag.double(), loss_mask),
        "version_lag_p95": Percentile.of_integers(version_lag[loss_mask], 0.95),
        "version_lag_max": Largest.of(version_lag[loss_mask]),
    }


def by_lag(log_weights: Tensor, rewards: Tensor, version_lag: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Found:
    """How far the data is from the policy, and what it earned, by the tokens' version lag.

    Args:
        log_weights: [T] log(prox / mu), uncut.
        rewards: [N].
        version_lag: [T] versions between a token's birth and now.
        loss_mask, sequence_ids: [T].

    Keys for each bucket of ``LAG_BUCKETS`` that holds a token: ``lag_3-4/ess_fraction``, ``/ratio_mean`` and ``/kl``
    (KL(mu || prox) by k3) over its tokens; ``/reward_mean`` over the sequences that have a token in it, each once;
    ``/token_fraction``, its share of all tokens.
    """
    bucket = torch.bucketize(version_lag.clamp(min=0), torch.tensor(_LAG_EDGES, device=version_lag.device))
    logs = masked_values(log_weights.detach(), loss_mask).double()
    ratio = ratio_of(logs)
    found: Found = {}
    for number, name in enumerate(LAG_BUCKETS):
        here = loss_mask & (bucket == number)
        count = float(here.sum())
        present = torch.zeros(len(rewards), dtype=torch.bool, device=rewards.device)
        present[sequence_ids[here]] = True
        # Report a bucket without tokens too: another rank may have some, and its share is of all tokens.
        found |= {
            f"lag_{name}/ess_fraction": EffectiveSize.over(logs, here, share=True),
            f"lag_{name}/ratio_mean": Mean.over(ratio, here),
            f"lag_{name}/kl": Mean.over(ratio - 1 - logs, here),
            f"lag_{name}/reward_mean": Mean.over(rewards.double(), present),
            f"lag_{name}/token_fraction": Mean(count, float(loss_mask.sum())),
        }
    return found


def without_empty_lags(metrics: dict[str, float]) -> dict[str, float]:
    """``metrics`` without those of ``by_lag`` whose bucket holds no token."""
    empty = tuple(f"lag_{name}/" for name in LAG_BUCKETS if not metrics.get(f"lag_{name}/token_fraction"))
    return {name: value for name, value in metrics.items() if not name.startswith(empty)}


@dataclass(frozen=True)
class ExplainedVariance(Statistic):
    """1 - var(returns - values) / var(returns); 0 when the returns do not vary.

    Returns whose differences are below ``RETURN_NOISE`` of the size of returns and values count as equal: a return is
    computed as advantage plus value, so that equal ones differ by rounding, which no critic can explain.
    """

    returns: Spread
    errors: Spread
    size: Mean  # of returns and values, squared

    def __float__(self) -> float:
        if not self.returns.variance > RETURN_NOISE**2 * float(self.size):
            return 0.0
        return 1 - self.errors.variance / self.returns.variance


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> Statistic:
    """How well ``values [T]`` predict ``returns [T]`` over the mask; ``ExplainedVariance`` has the formula."""
    target, guess = (masked_values(x.detach(), loss_mask).double() for x in (returns, values))
    return ExplainedVariance(
        Spread.over(target, loss_mask),
        Spread.over(target - guess, loss_mask),
        Mean.over(target.square() + guess.square(), loss_mask),
    )
