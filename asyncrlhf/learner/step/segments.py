"""Credit by segments: rewards within a sequence, each credited to the tokens of its segment and of those before it.

A segment is a run of tokens that counts as one action: an episode's turn. Formulas take tensors and numbers, in the
shapes of ``algorithms/``: T packed tokens, N sequences, and S segments. Each token belongs to a segment, whether it
trains or not: what a segment earned counts for those before it even if no token of it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrlhf.algorithms.advantages import gae
from asyncrlhf.algorithms.masked import group_reduce, masked_values, segment_sum
from asyncrlhf.algorithms.weights import ratio_of
from asyncrlhf.types import TrainBatch

NO_TURNS = "algorithm.credit=turn needs a batch that was packed with its turns"


class Segments(NamedTuple):
    """Where the segments of T tokens lie, in the tokens' order."""

    of_token: Tensor  # [T] int64, 0 to S-1: each token's segment
    first: Tensor  # [S] its first token among the T
    sequence_ids: Tensor  # [S]
    number: Tensor  # [S] within its sequence

    @classmethod
    def of(cls, numbers: Tensor, sequence_ids: Tensor) -> Segments:
        """``numbers`` [T]: of each token's segment within its sequence, from 0 and never falling."""
        starts = torch.ones_like(numbers, dtype=torch.bool)
        starts[1:] = (numbers.diff() != 0) | (sequence_ids.diff() != 0)
        first = starts.nonzero().squeeze(-1)
        return cls(starts.cumsum(0) - 1, first, sequence_ids[first], numbers[first])

    @property
    def last(self) -> Tensor:
        """[S] bool: whether it is its sequence's last."""
        return torch.cat((self.sequence_ids.diff() != 0, torch.ones_like(self.sequence_ids[:1], dtype=torch.bool)))

    def total(self, x: Tensor) -> Tensor:
        """The sum of ``x`` [T] over each segment: [S]."""
        return segment_sum(x, self.of_token, len(self.first))

    def rest(self, x: Tensor) -> Tensor:
        """The sum of ``x`` [T] from each token to the end of its segment: [T]."""
        return gae(x, torch.zeros_like(x), torch.ones_like(self.of_token, dtype=torch.bool), self.of_token)[0]

    def following(self, x: Tensor, final: Tensor | None = None) -> Tensor:
        """``x`` [S] of the next segment; of a sequence's last one its entry of ``final`` [N], 0 if None: [S]."""
        ends = torch.zeros_like(x) if final is None else final.detach()[self.sequence_ids].to(x.dtype)
        return torch.where(self.last, ends, torch.cat((x[1:], x[:1])))

    def without_last(self, x: Tensor, sequences: Tensor) -> Tensor:
        """``x`` [T], 0 on the last segment of the chosen ``sequences`` [N] bool: [T]."""
        return x.masked_fill((self.last & sequences[self.sequence_ids])[self.of_token], 0.0)

    def peers(self, group_ids: Tensor) -> Tensor:
        """Which segments are compared: those of one number in one group (``group_ids`` [N]) have one index: [S]."""
        pairs = torch.stack((group_ids[self.sequence_ids], self.number))
        return torch.unique(pairs, dim=1, return_inverse=True)[1]


def segment_returns(token_rewards: Tensor, segments: Segments, *, gamma: float) -> Tensor:
    """G_k = r_k + gamma G_{k+1}: [S], r_k being the sum of ``token_rewards`` [T] over segment k."""
    rewards = segments.total(token_rewards.detach())
    every = torch.ones_like(segments.first, dtype=torch.bool)
    return gae(rewards, torch.zeros_like(rewards), every, segments.sequence_ids, gamma=gamma)[0]


def relative(
    returns: Tensor,
    segments: Segments,
    group_ids: Tensor,
    rule: Callable[[Tensor, Tensor], Tensor],
    *,
    leave_one_out: bool = False,
) -> Tensor:
    """The advantage of each segment among the segments of the same number in its group: [S].

    ``returns`` [S], ``group_ids`` [N]; ``rule``: of ``advantages.py``, on values and group ids. Sequences without a
    segment of that number are not compared, as if there were fewer siblings. A segment that no sibling has gets what
    the rule gives a group of one, which is 0. ``leave_one_out``: the rule refuses a group of one; such a segment, if it
    is not the first, then gets its return, less a baseline of 0, which leaves the gradient unbiased.
    """
    peers = segments.peers(group_ids)
    if not leave_one_out:
        return rule(returns, peers)
    alone = (group_reduce(torch.ones_like(returns), peers, "sum") < 2) & (segments.number > 0)
    found = returns.clone()
    found[~alone] = rule(returns[~alone], peers[~alone])
    return found


def flat_turns(batch: TrainBatch, *, gamma: float, relative: bool) -> np.ndarray:
    """Sequences [N] none of whose turns has an advantage: its return is 0, or, if it is ``relative``, that of at least
    two peers, which are all alike."""
    assert batch.turns is not None and batch.turn_rewards is not None, NO_TURNS
    where, lengths = batch.response_mask, np.diff(batch.cu_seqlens)
    numbers, rewards = torch.from_numpy(batch.turns[where]), torch.from_numpy(batch.turn_rewards[where])
    segments = Segments.of(numbers, torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[where]))
    returns = segment_returns(rewards, segments, gamma=gamma)
    flat = returns == 0
    if relative:
        peers = segments.peers(torch.from_numpy(batch.group_ids))
        alike = group_reduce(returns, peers, "amin") == group_reduce(returns, peers, "amax")
        flat |= alike & (group_reduce(torch.ones_like(returns), peers, "sum") > 1)
    return (segment_sum((~flat).long(), segments.sequence_ids, len(lengths)) == 0).numpy()


def segment_gae(
    token_rewards: Tensor,
    values: Tensor,
    *,
    numbers: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    gamma: float,
    lam: float,
    final_values: Tensor | None = None,
    log_ratio: Tensor | None = None,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rule: Callable[..., tuple[Tensor, Tensor]] = gae,
) -> tuple[Tensor, Tensor]:
    """``gae`` or ``vtrace`` (``rule``) with one step for each segment: (advantages [T], value targets [T]), detached,
    zero outside the mask.

    A step leads from the state in which a segment's first token is chosen to that of the next segment; its reward is
    the sum of ``token_rewards`` [T], its ratio the product over its masked tokens (``log_ratio`` [T]), and all its
    tokens get its advantage. The value at a later token would be no baseline for the tokens before it, on which it
    depends. The target at token t is that of the part of the step that lies ahead: with R_t, rho_t, c_t from the tokens
    t to the segment's end, V_t + rho_t (R_t + gamma V' - V_t) + gamma c_t (v' - V'), V' and v' being value and target
    at the next segment's start. ``numbers`` [T] as in ``Segments.of``, the other arguments as in ``gae``.
    """
    segments = Segments.of(numbers, sequence_ids)
    value, rewards = values.detach()[segments.first], segments.total(token_rewards.detach())
    logs = None if log_ratio is None else masked_values(log_ratio.detach(), loss_mask)
    advantages, targets = rule(
        rewards,
        value,
        loss_mask=torch.ones_like(segments.first, dtype=torch.bool),
        sequence_ids=segments.sequence_ids,
        log_ratio=None if logs is None else segments.total(logs),
        gamma=gamma,
        lam=lam,
        rho_bar=rho_bar,
        c_bar=c_bar,
        final_values=final_values,
    )
    after = segments.following(value, final_values)[segments.of_token]
    gap = segments.following(targets - value)[segments.of_token]
    here = masked_values(values.detach(), loss_mask)
    rho, trace = torch.ones_like(here), torch.full_like(here, lam)
    if logs is not None:
        ratio = ratio_of(segments.rest(logs))
        rho, trace = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    ahead = here + rho * (segments.rest(token_rewards) + gamma * after - here) + gamma * trace * gap
    return masked_values(advantages[segments.of_token], loss_mask), masked_values(ahead, loss_mask)
