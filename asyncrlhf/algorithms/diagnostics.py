"""What a training step should be asked: effective sample size, drift between policies, clipping, the critic's fit.

All functions take the whole step's tokens at once (quantiles and effective sample sizes do not add up over
microbatches), return 0-dim tensors, and give 0 where the mask is empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrlhf.algorithms.gates import harmful
from asyncrlhf.algorithms.masked import masked_mean, masked_values, percentile, segment_sum
from asyncrlhf.algorithms.weights import ratio_of

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LAG_EDGES = (0, 1, 2, 4, 8)  # the largest lag of each bucket but the last

RETURN_NOISE = 1e-5


def effective_sample_size(log_weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """((sum w)^2 / sum w^2, that over the count) for w = exp(log_weights [n]) over ``mask``, neither cut nor clamped.

    The fraction is 1 for equal weights and 1/n when one weight holds everything. The largest weight is scaled to 1
    first, so that no log-weight is too large.
    """
    count = mask.sum()
    if not len(log_weights):
        return log_weights.new_zeros(()), log_weights.new_zeros(())
    hidden = torch.where(mask, log_weights.detach(), -torch.inf)
    top = hidden.max().nan_to_num(neginf=0.0)
    weights = (hidden - top).exp()
    ess = weights.sum().square() / weights.square().sum().clamp(min=1.0)
    return ess, ess / count.clamp(min=1)


def weight_diagnostics(log_weights: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> dict[str, Tensor]:
    """ESS of the behavior weights, from ``log_weights [T]`` = log(prox / mu) a token.

    ``ess``, ``ess_fraction``: over tokens. ``sequence_ess``, ``sequence_ess_fraction``: over the sequences' products.
    """
    kept = masked_values(log_weights.detach(), loss_mask)
    ess, fraction = effective_sample_size(kept, loss_mask)
    products = segment_sum(kept.double(), sequence_ids, len(kept))
    present = segment_sum(loss_mask.long(), sequence_ids, len(kept)) > 0
    sequence_ess, sequence_fraction = effective_sample_size(products, present)
    return {
        "ess": ess,
        "ess_fraction": fraction,
        "sequence_ess": sequence_ess,
        "sequence_ess_fraction": sequence_fraction,
    }


def log_ratio_diagnostics(log_ratio: Tensor, loss_mask: Tensor, prefix: str) -> dict[str, Tensor]:
    """``log_ratio [T]`` a token: mean, and mean, 99th percentile and largest of its absolute value.

    Keys: ``{prefix}_log_ratio_mean``, ``_abs_mean``, ``_abs_p99``, ``_abs_max``.
    """
    kept = masked_values(log_ratio.detach(), loss_mask)
    sizes = kept[loss_mask].abs()
    zero = kept.new_zeros(())
    return {
        f"{prefix}_log_ratio_mean": masked_mean(kept, loss_mask),
        f"{prefix}_log_ratio_abs_mean": masked_mean(kept.abs(), loss_mask),
        f"{prefix}_log_ratio_abs_p99": percentile(sizes, 0.99) if len(sizes) else zero,
        f"{prefix}_log_ratio_abs_max": sizes.max() if len(sizes) else zero,
    }


def kl_diagnostics(
    policy_logprobs: Tensor, sampler_logprobs: Tensor, loss_mask: Tensor, prefix: str
) -> dict[str, Tensor]:
    """KL both ways between a policy and the policy that sampled the tokens; each term is >= 0, like k3's.

    With r = policy / sampler: ``{prefix}_kl`` estimates KL(sampler || policy) by r - 1 - log r, ``{prefix}_reverse_kl``
    estimates KL(policy || sampler) by r log r - r + 1. Also ``{prefix}_max_abs_dprob``: the largest change of a
    token's probability.
    """
    policy = masked_values(policy_logprobs.detach(), loss_mask)
    sampler = masked_values(sampler_logprobs.detach(), loss_mask)
    difference = policy - sampler
    ratio = ratio_of(difference)
    gap = (policy.exp() - sampler.exp()).abs()
    return {
        f"{prefix}_kl": masked_mean(ratio - 1 - difference, loss_mask),
        f"{prefix}_reverse_kl": masked_mean(ratio * difference - ratio + 1, loss_mask),
        f"{prefix}_max_abs_dprob": gap.max() if len(gap) else gap.new_zeros(()),
    }


def clip_diagnostics(clipped: Tensor, advantages: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Share of tokens on which the clip rule acted: of all, of those with A > 0, of those with A < 0."""
    share = clipped.to(advantages.dtype)
    return {
        "clip_fraction": masked_mean(share, loss_mask),
        "clip_fraction_positive": masked_mean(share, loss_mask & (advantages > 0)),
        "clip_fraction_negative": masked_mean(share, loss_mask & (advantages < 0)),
    }


def harmful_second_moment(log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean (log r)^2 over the harmful tokens of ``gates.harmful``: what M2PO (2510.01161) holds down. 0-dim."""
    moved = masked_values(log_ratio.detach(), loss_mask)
    return masked_mean(moved.square(), harmful(moved, advantages, loss_mask))


def lag_diagnostics(version_lag: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """``version_lag [T]``, the policy's version less that of the token: its mean, 95th percentile and largest value.

    Keys: ``version_lag_mean``, ``version_lag_p95``, ``version_lag_max``.
    """
    lags = version_lag[loss_mask].double()
    zero = lags.new_zeros(())
    return {
        "version_lag_mean": lags.mean() if len(lags) else zero,
        "version_lag_p95": percentile(lags, 0.95) if len(lags) else zero,
        "version_lag_max": lags.max() if len(lags) else zero,
    }


def by_lag(
    log_weights: Tensor, rewards: Tensor, version_lag: Tensor, loss_mask: Tensor, sequence_ids: Tensor
) -> dict[str, Tensor]:
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
    where = loss_mask.nonzero().squeeze(-1)
    edges = torch.tensor(_LAG_EDGES, device=where.device)
    bucket = torch.bucketize(version_lag[where].clamp(min=0), edges)
    logs = log_weights.detach()[where].double()
    empty = logs.new_zeros(len(LAG_BUCKETS))
    count = torch.bincount(bucket, minlength=len(LAG_BUCKETS))

    def total(x: Tensor) -> Tensor:
        return empty.index_add(0, bucket, x)

    ratio = ratio_of(logs)
    # As in effective_sample_size: the largest weight of each bucket is scaled to 1.
    scaled = (logs - empty.scatter_reduce(0, bucket, logs, "amax", include_self=False)[bucket]).exp()
    present = torch.zeros(len(LAG_BUCKETS), len(rewards), dtype=torch.bool, device=where.device)
    present[bucket, sequence_ids[where]] = True
    tokens = count.clamp(min=1)
    columns = {
        "ess_fraction": total(scaled).square() / total(scaled.square()).clamp(min=1.0) / tokens,
        "ratio_mean": total(ratio) / tokens,
        "kl": total(ratio - 1 - logs) / tokens,
        "reward_mean": (present * rewards.detach().double()).sum(1) / present.sum(1).clamp(min=1),
        "token_fraction": count.double() / max(1, len(where)),
    }
    filled = [b for b, held in enumerate(count.tolist()) if held]
    return {f"lag_{LAG_BUCKETS[b]}/{name}": column[b] for b in filled for name, column in columns.items()}


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns) over the mask; 0 when the returns do not vary. 0-dim.

    Returns that differ by less than ``RETURN_NOISE`` of the size of returns and values do not vary: a return is made as
    advantage plus value, and equal ones come back only up to rounding, which no critic can explain.
    """
    target = masked_values(returns.detach(), loss_mask).double()
    guess = masked_values(values.detach(), loss_mask).double()
    spread = _variance(target, loss_mask)
    size = masked_mean(target.square() + guess.square(), loss_mask)
    fit = 1 - _variance(target - guess, loss_mask) / spread.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(spread > RETURN_NOISE**2 * size, fit, 0.0).to(values.dtype)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, mask)).square(), mask)
