"""Advantages: group-relative ones from rewards a sequence, and GAE from values a token.

Groups may be ragged (a sibling may have failed) and in any order: ``group_ids [N]`` says who belongs together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrlhf.algorithms.masked import masked_values


class _Groups(NamedTuple):
    """Each rollout's reward less its group's mean, its group's size, and its group's sum of squares: [N] float64."""

    centred: Tensor
    size: Tensor
    squares: Tensor


def _groups(rewards: Tensor, group_ids: Tensor) -> _Groups:
    names, index = torch.unique(group_ids, return_inverse=True)
    zeros = torch.zeros(len(names), dtype=torch.float64, device=rewards.device)
    values = rewards.detach().double()
    # Taking the group's minimum off first makes the centred rewards of a group without spread exactly zero.
    values = values - zeros.scatter_reduce(0, index, values, "amin", include_self=False)[index]
    size = zeros.index_add(0, index, torch.ones_like(values))[index]
    centred = values - zeros.index_add(0, index, values)[index] / size
    return _Groups(centred, size, zeros.index_add(0, index, centred.square())[index])


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
        raise ValueError(f"leave-one-out advantages need at least two rollouts a group; group {int(alone[0])} has one.")
    return (groups.centred * groups.size / (groups.size - 1)).to(rewards.dtype)


def group_norm(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A = (R - group mean) / (group std + eps), std with ddof 1: [N] (GRPO, 2402.03300). A group of one gives 0."""
    groups = _groups(rewards, group_ids)
    std = (groups.squares / (groups.size - 1).clamp(min=1)).sqrt()
    return (groups.centred / (std + eps)).to(rewards.dtype)


SEQUENCE_ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "raw": raw,
    "group_mean": group_mean,
    "loo": loo,
    "group_norm": group_norm,
}


def broadcast(per_sequence: Tensor, sequence_ids: Tensor) -> Tensor:
    """[N] to [T]: every token takes its sequence's number."""
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
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438): (advantages [T], returns [T]), detached, zero outside the mask.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return = A + V; t runs over a sequence's
    masked tokens only, so that value and accumulator are carried over the tokens between. ``values [T]``: entry t is
    the value of the state that token t is chosen in; after the last masked token it is 0. Rewards on unmasked tokens
    are not seen.
    """
    where = loss_mask.nonzero().squeeze(-1)
    if not len(where):
        return torch.zeros_like(values), torch.zeros_like(values)
    rows = sequence_ids[where]
    counts = torch.bincount(rows)
    columns = torch.arange(len(where), device=where.device) - (counts.cumsum(0) - counts)[rows]
    steps = int(counts.max())
    # One row a sequence, its masked tokens side by side: the recursion walks columns, all sequences at once. Zeros
    # behind the end of a short row leave its recursion at zero.
    reward = values.new_zeros(len(counts), steps).index_put(
        (rows, columns), token_rewards.detach()[where].to(values.dtype)
    )
    value = values.new_zeros(len(counts), steps + 1).index_put((rows, columns), values.detach()[where])
    delta = reward + gamma * value[:, 1:] - value[:, :-1]
    advantages = torch.empty_like(delta)
    accumulator = values.new_zeros(len(counts))
    for step in reversed(range(steps)):
        accumulator = delta[:, step] + gamma * lam * accumulator
        advantages[:, step] = accumulator
    packed = torch.zeros_like(values.detach()).index_put((where,), advantages[rows, columns])
    return packed, packed + masked_values(values.detach(), loss_mask)
