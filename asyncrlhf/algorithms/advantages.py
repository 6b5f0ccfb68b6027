"""Advantages: group-relative ones from one reward per sequence, GAE and V-trace from one value per token.

Groups may be ragged (a sibling may have failed) and in any order: rollout i belongs to group ``group_ids[i]``, [N].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrlhf.algorithms.masked import group_reduce, masked_values, segment_sum
from asyncrlhf.algorithms.weights import ratio_of

# A float32 log-prob near 0 is known to about 1e-5 (rounding of logits of size 100), so that its (1 - pi)^2 is to 1e-10.
SCORE_NOISE = 1e-10


class _Groups(NamedTuple):
    """Each rollout's reward less its group's mean, its group's size, and its group's sum of squares: [N] float64."""

    centred: Tensor
    size: Tensor
    squares: Tensor


def _groups(rewards: Tensor, group_ids: Tensor) -> _Groups:
    values = rewards.detach().double()
    # Taking the group's minimum off first makes the centred rewards of a group without spread exactly zero.
    values = values - group_reduce(values, group_ids, "amin")
    size = group_reduce(torch.ones_like(values), group_ids, "sum")
    centred = values - group_reduce(values, group_ids, "sum") / size
    return _Groups(centred, size, group_reduce(centred.square(), group_ids, "sum"))


def raw(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A = R: [N]."""
    return rewards.detach()


def group_mean(rewards: Tensor, group_ids: Tensor, *, shift: float = 0.0) -> Tensor:
    """A = R - (group mean + shift): [N] (Dr. GRPO 2503.20783; AsymRE 2506.20520 with shift about -0.1).

    A group of one gives 0.
    """
    groups = _groups(rewards, group_ids)
    return torch.where(groups.size > 1, groups.centred - shift, 0.0).to(rewards.dtype)


def loo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = R_i - mean of the siblings' rewards: [N] (RLOO, 2402.14740).

    Raises ValueError for a group of one: it has no siblings, and any baseline would be a guess.
    """
    groups = _groups(rewards, group_ids)
    alone = group_ids[groups.size < 2]
    if len(alone):
        raise ValueError(
            f"leave-one-out advantages need at least two rollouts per group; group {int(alone[0])} has one."
        )
    return (groups.centred * groups.size / (groups.size - 1)).to(rewards.dtype)


def group_norm(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A = (R - group mean) / (group std + eps), std with ddof 1: [N] (GRPO, 2402.03300). A group of one gives 0."""
    groups = _groups(rewards, group_ids)
    std = (groups.squares / (groups.size - 1).clamp(min=1)).sqrt()
    return (groups.centred / (std + eps)).to(rewards.dtype)


def mean_norm(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A = (R - group mean) / group mean: [N] (MaxRL, 2602.02710), for R >= 0; 0 where the mean is not above 0."""
    mean = group_reduce(rewards.detach().double(), group_ids, "mean")
    return (_groups(rewards, group_ids).centred / torch.where(mean > 0, mean, torch.inf)).to(rewards.dtype)


def batch_mean(rewards: Tensor, total: Tensor) -> Tensor:
    """A = R - the batch's mean: [N] (FlashREINFORCE). ``total`` [3]: the rewards' ``moments``, over all ranks."""
    return (rewards.detach().double() - total[1] / total[0].clamp(min=1)).to(rewards.dtype)


def vstar(rewards: Tensor, group_ids: Tensor, *, beta: float) -> Tensor:
    """A = R - V*, V* = beta log mean exp(R / beta) over the group: [N] (A*PO, 2505.20686). A group of one gives 0.

    V* goes from the group's mean to its maximum as ``beta`` (> 0) goes from infinity to 0.
    """
    if beta <= 0:
        raise ValueError(f"V* divides by its beta, which was {beta}; allowed: > 0.")
    values = rewards.detach().double()
    # The best reward is taken off first, so that no exponential overflows.
    values = values - group_reduce(values, group_ids, "amax")
    mean = group_reduce((values / beta).exp(), group_ids, "mean")
    return (values - beta * mean.log()).to(rewards.dtype)


def opob(rewards: Tensor, group_ids: Tensor, *, log_weights: Tensor, score_norms: Tensor) -> Tensor:
    """A = R - b, b = sum w^2 g^2 R / sum w^2 g^2 over the group: [N], the baseline of least variance (2602.17616).

    ``log_weights`` [N], finite: log of the sequence's behavior weight w. ``score_norms`` [N]: g^2 >= 0, the squared
    norm of the sequence's score, or the proxy of ``score_norms``. If the mean of g^2 under w^2 is below
    ``SCORE_NOISE``, b is the group's mean: the score of so saturated a policy is only rounding. A group of one gives 0.
    """
    centred = _groups(rewards, group_ids).centred
    logs = log_weights.detach().double()
    # A factor that a whole group shares cancels: its largest weight is scaled to 1, so that none overflows.
    weights = (2 * (logs - group_reduce(logs, group_ids, "amax"))).exp()
    scale = weights * score_norms.detach().double()
    total = group_reduce(scale, group_ids, "sum")
    known = total > SCORE_NOISE * group_reduce(weights, group_ids, "sum")
    baseline = group_reduce(scale * centred, group_ids, "sum") / torch.where(known, total, 1.0)
    return torch.where(known, centred - baseline, centred).to(rewards.dtype)


def score_norms(
    policy_logprobs: Tensor, collision: Tensor, loss_mask: Tensor, sequence_ids: Tensor, num_sequences: int
) -> Tensor:
    """sum_t (1 - 2 pi_t + sum_v pi_v^2): [N], the approximation of a sequence's squared score norm that ``opob`` uses.

    Each term is the squared norm of the gradient of log pi_t in the token's logits: (1 - pi_t)^2, plus pi_v^2 of the
    other tokens, whose sum is between 0 and (1 - pi_t)^2. Clamping to this range keeps a term >= 0 when pi_t rounds to
    1. ``collision`` [T] is ``logprobs.collision_probability``.
    """
    logprobs = masked_values(policy_logprobs.detach(), loss_mask)
    rest = logprobs.expm1().square()
    others = masked_values(collision, loss_mask) - (2 * logprobs).exp()
    terms = rest + torch.minimum(others.clamp(min=0), rest)
    return segment_sum(masked_values(terms, loss_mask), sequence_ids, num_sequences)


RULES = (raw, group_mean, loo, group_norm, mean_norm)
SEQUENCE_ADVANTAGES: dict[str, Callable[..., Tensor]] = {rule.__name__: rule for rule in RULES}


def broadcast(per_sequence: Tensor, sequence_ids: Tensor) -> Tensor:
    """[N] to [T]: every token gets its sequence's number."""
    return per_sequence[sequence_ids]


def terminal_rewards(rewards: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """``rewards [N]`` on the last masked token of each sequence, 0 elsewhere: [T]."""
    positions = torch.arange(len(loss_mask), device=loss_mask.device)
    last = torch.full((len(rewards),), -1, dtype=torch.int64, device=loss_mask.device)
    last = last.scatter_reduce(0, sequence_ids, torch.where(loss_mask, positions, -1), "amax")
    return torch.where(positions == last[sequence_ids], rewards.detach()[sequence_ids], 0.0)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    final_values: Tensor | None = None,
    log_ratio: Tensor | None = None,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438): (advantages [T], value targets [T]), detached, zero outside the
    mask.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, target = A + V; t runs over a sequence's
    masked tokens only, so that value and accumulator are carried over the tokens between. ``values [T]``: entry t is
    the value of the state in which token t is chosen. ``final_values [N]``: the value of the state after a sequence's
    last masked token; None: 0, because the sequence ended there. Rewards on unmasked tokens are ignored.

    ``log_ratio`` [T], log(pi / mu), corrects for tokens that mu sampled. The targets are then V-trace's (1802.01561)
    with rho = min(rho_bar, r) and c = lam min(c_bar, r): v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1}),
    whose fixed point is V^pi where no ratio exceeds ``rho_bar``; without it the fixed point is V^mu. The advantage is
    A_t = delta_t + gamma lam (v_{t+1} - V_{t+1}): the loss applies the token's own ratio. With all ratios 1 both equal
    plain GAE, for any lam.
    """
    rows = _Rows.of(loss_mask, sequence_ids)
    reward, value = rows.pack(token_rewards, values.dtype), rows.pack(values, values.dtype)
    delta = reward + gamma * rows.following(value, final_values) - value
    rho, trace = torch.ones_like(delta), torch.full_like(delta, lam)
    if log_ratio is not None:
        rho, trace = _cut_ratios(rows, log_ratio, loss_mask, delta, lam, rho_bar, c_bar)
    gaps = _gaps(delta, rho, trace, gamma)
    advantages = delta + gamma * lam * rows.following(gaps, None)
    return rows.unpack(advantages), rows.unpack(gaps) + masked_values(values.detach(), loss_mask)


def vtrace(
    token_rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace (1802.01561): (advantages [T], value targets v [T]), detached, zero outside the mask.

    With r = exp(``log_ratio`` [T]), the target policy over mu, rho = min(rho_bar, r) and c = lam min(c_bar, r):
    v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1}) and
    A_t = rho_t (r_t + gamma v_{t+1} - V_t). Tokens, values and ``final_values`` as in ``gae``, which it equals on
    policy with lam = 1. It needs a critic: with V = 0 and a reward at the end, the first token's advantage is a product
    of numbers <= 1 that vanishes with length.
    """
    rows = _Rows.of(loss_mask, sequence_ids)
    reward, value = rows.pack(token_rewards, values.dtype), rows.pack(values, values.dtype)
    delta = reward + gamma * rows.following(value, final_values) - value
    rho, trace = _cut_ratios(rows, log_ratio, loss_mask, delta, lam, rho_bar, c_bar)
    gaps = _gaps(delta, rho, trace, gamma)
    return rows.unpack(rho * (delta + gamma * rows.following(gaps, None))), rows.unpack(value + gaps)


def _cut_ratios(
    rows: _Rows, log_ratio: Tensor, loss_mask: Tensor, like: Tensor, lam: float, rho_bar: float, c_bar: float
) -> tuple[Tensor, Tensor]:
    """(rho, c) of V-trace as tables."""
    ratio = rows.pack(ratio_of(masked_values(log_ratio.detach(), loss_mask)), like.dtype)
    return ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)


def _gaps(delta: Tensor, rho: Tensor, trace: Tensor, gamma: float) -> Tensor:
    """v - V as a table: gap_t = rho_t delta_t + gamma trace_t gap_{t+1}."""
    gaps = torch.zeros_like(delta)
    accumulator = delta.new_zeros(len(delta))
    for step in reversed(range(delta.shape[1])):
        accumulator = rho[:, step] * delta[:, step] + gamma * trace[:, step] * accumulator
        gaps[:, step] = accumulator
    return gaps


class _Rows(NamedTuple):
    """Masked tokens as a padded table with one row per sequence, so that a recursion runs over columns for all
    sequences at once.

    Zeros after the end of a short row keep its recursion at zero.
    """

    where: Tensor  # [M] positions of the masked tokens among T
    row: Tensor  # [M]
    column: Tensor  # [M]
    shape: tuple[int, int]
    tokens: int  # T

    @classmethod
    def of(cls, loss_mask: Tensor, sequence_ids: Tensor) -> _Rows:
        where = loss_mask.nonzero().squeeze(-1)
        row = sequence_ids[where]
        counts = torch.bincount(row)
        column = torch.arange(len(where), device=where.device) - (counts.cumsum(0) - counts)[row]
        return cls(where, row, column, (len(counts), int(counts.max()) if len(where) else 0), len(loss_mask))

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        table = torch.zeros(self.shape, dtype=dtype, device=x.device)
        return table.index_put((self.row, self.column), x.detach()[self.where].to(dtype))

    def unpack(self, table: Tensor) -> Tensor:
        return table.new_zeros(self.tokens).index_put((self.where,), table[self.row, self.column])

    def following(self, table: Tensor, final: Tensor | None) -> Tensor:
        """Column t holds the former column t + 1; a row's last token gets its entry of ``final`` [N], 0 if None."""
        shifted = torch.nn.functional.pad(table[:, 1:], (0, 1))[:, : table.shape[1]]
        if final is None:
            return shifted
        last = torch.bincount(self.row) - 1
        filled = (last >= 0).nonzero().squeeze(-1)
        return shifted.index_put((filled, last[filled]), final.detach()[filled].to(table.dtype))
