"""Two heads beside the policy gradient: squared regression on log-ratios, and losses on pairs of siblings.

D_i = sum_t (theta_t - anchor_t) over a sequence's masked tokens. A head's gradient is one detached coefficient a
sequence times grad log pi(y), so it goes through ``losses.policy_loss`` as the advantage, with coefficient ``one`` and
aggregate ``seq_sum``: the update's loss is the sum of ``losses`` over the number of its sequences.

| head | sum of our losses, against the paper's loss summed over sequences or groups |
|---|---|
| regress ``group`` | beta / 2 times TBA's (2503.18929), (K - 1) / (2 beta K) times CoPG's (2406.19185) |
| regress ``mean`` | OPMD's (2501.12599) with tau = beta, plus a constant |
| regress ``vstar`` | 1 / (2 beta) times A*PO's (2505.20686) and OAPL's (2602.19362), with beta2 = beta |
| pair | DPO's (2305.18290), IPO's (2310.12036), best-of-n's; a mean over groups of K is K times our loss |

K is the group's size. Under ``regress`` the coefficient is the residual e_i itself, of a reward's size whatever beta.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrlhf.algorithms.advantages import group_mean, vstar
from asyncrlhf.algorithms.masked import group_reduce


def regress(
    log_ratios: Tensor, rewards: Tensor, group_ids: Tensor, *, beta: float, target: str, vstar_beta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(coefficients [N], losses [N]), detached: e_i and e_i^2 / (2 beta).

    Args:
        log_ratios: [N] D.
        rewards, group_ids: [N].
        beta: > 0, of D against the reward.
        target: ``group``: e_i = (R_i - mean R) - beta (D_i - mean D), the means over the group; TBA and CoPG.
            ``mean``: e_i = (R_i - mean R) - beta D_i; OPMD. ``vstar``: e_i = (R_i - V*) - beta D_i; A*PO and OAPL.
        vstar_beta: of V*, see ``advantages.vstar``; looked at under ``vstar`` only.

    A group of one has nothing to learn but its log-ratio: under ``mean`` and ``vstar`` it is drawn to the anchor, under
    ``group`` it gives zero.
    """
    if beta <= 0:
        raise ValueError(f"a regression on log-ratios divides by beta, which was {beta}; allowed: > 0.")
    drift, gain = beta * log_ratios.detach().double(), rewards.detach().double()
    if target == "group":
        residual = group_mean(gain - drift, group_ids)
    elif target == "mean":
        residual = group_mean(gain, group_ids) - drift
    elif target == "vstar":
        residual = vstar(gain, group_ids, beta=vstar_beta) - drift
    else:
        raise ValueError(f"regress_target={target} is not known; allowed: group, mean, vstar.")
    return residual.to(log_ratios.dtype), (residual.square() / (2 * beta)).to(log_ratios.dtype)


def _dpo(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    return -logsigmoid(beta * gap), beta * (-beta * gap).sigmoid()


def _ipo(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    short = 1 / (2 * beta) - gap
    return short.square(), 2 * short


# Each returns (loss, -d loss / d gap) of a gap D_w - D_l.
PAIR_LOSSES: dict[str, Callable[[Tensor, float], tuple[Tensor, Tensor]]] = {"dpo": _dpo, "ipo": _ipo}


def pair(log_ratios: Tensor, rewards: Tensor, group_ids: Tensor, *, beta: float, kind: str) -> tuple[Tensor, Tensor]:
    """(coefficients [N], losses [N]), detached, from the best (w) and the worst (l) of each group by reward.

    Args:
        log_ratios: [N] D.
        rewards, group_ids: [N].
        beta: > 0; not looked at under ``best``.
        kind: ``dpo``: -log sigmoid(beta (D_w - D_l)). ``ipo``: (D_w - D_l - 1 / (2 beta))^2.
            ``best``: -D_w, which is likelihood's gradient whatever the anchor.

    Several best or worst ones share: a group's loss is the mean over all pairs of a best and a worst, so that the order
    of siblings never decides. A pair's loss is split between its two. A group whose rewards are all equal, or with one
    rollout, gives zeros.
    """
    if kind != "best" and kind not in PAIR_LOSSES:
        raise ValueError(f"pair_loss={kind} is not known; allowed: dpo, ipo, best.")
    if kind != "best" and beta <= 0:
        raise ValueError(f"a loss on pairs needs beta > 0; it was {beta}.")
    drift = log_ratios.detach().double()
    best, worst, share = _pairs(rewards.detach(), group_ids)
    zeros = torch.zeros_like(drift)
    if kind == "best":
        chosen = zeros.index_add(0, best, share)
        return chosen.to(log_ratios.dtype), (-chosen * drift).to(log_ratios.dtype)
    loss, pull = PAIR_LOSSES[kind](drift[best] - drift[worst], beta)
    coefficients = zeros.index_add(0, best, share * pull).index_add(0, worst, -share * pull)
    losses = zeros.index_add(0, best, share * loss / 2).index_add(0, worst, share * loss / 2)
    return coefficients.to(log_ratios.dtype), losses.to(log_ratios.dtype)


def _pairs(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every (best, worst) of each group with spread, [P] each, and 1 / its group's number of pairs, [P] float64."""
    names, index = torch.unique(group_ids, return_inverse=True)
    high, low = group_reduce(rewards, group_ids, "amax"), group_reduce(rewards, group_ids, "amin")
    best = ((rewards == high) & (high > low)).nonzero().squeeze(-1)
    worst = ((rewards == low) & (high > low)).nonzero().squeeze(-1)
    worst = worst[index[worst].argsort(stable=True)]
    rivals = torch.bincount(index[worst], minlength=len(names))
    leaders = torch.bincount(index[best], minlength=len(names))
    # Each best rollout is paired with all the worst of its group, which are adjacent from ``first`` on.
    first, repeats = rivals.cumsum(0) - rivals, rivals[index[best]]
    left = best.repeat_interleave(repeats)
    turn = torch.arange(len(left), device=left.device) - (repeats.cumsum(0) - repeats).repeat_interleave(repeats)
    right = worst[first[index[left]] + turn]
    return left, right, 1.0 / (leaders * rivals)[index[left]].double()
