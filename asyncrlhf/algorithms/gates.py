"""Gates: which tokens stay in the policy loss, depending on how far the policy is from the sampler.

Every gate returns keep [T] bool for ``policy_loss(gate=...)``; its value outside the mask has no effect. ``log_ratio``
[T] is log(pi / mu) per token. ``m2_gate`` and ``sat_gate`` rank tokens: they need all those of an optimizer update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrlhf.algorithms.masked import masked_values, percentile, segment_total, sequence_lengths
from asyncrlhf.algorithms.weights import log_ratio as log_ratio_at

# The least 1 - p that counts: a float32 log-prob near 0 says no more.
REST_NOISE = 1e-6
# ESTR's: in nats, so that a token without entropy may still move.
ENTROPY_FLOOR = 0.01


def harmful(log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Tokens that have already moved in the direction of A: A > 0 and r > 1, or A < 0 and r < 1: [T] bool."""
    return loss_mask & (advantages.detach() * log_ratio.detach() > 0)


def m2_gate(log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, threshold: float) -> Tensor:
    """M2PO (2510.01161): drops the fewest harmful tokens such that the others' mean (log r)^2 is <= ``threshold``.

    The paper's Algorithm 1 starts from the "trust-region tokens" and removes the one with the largest (log r)^2 until
    the mean over the rest is at most the threshold. The authors' code (Infini-AI-Lab/M2PO,
    ``verl/trainer/ppo/core_algos.py``) defines these tokens: A > 0 and r > 1, or A < 0 and r < 1. So harmless tokens
    are neither counted nor dropped. AReaL's code takes the mean over all tokens, and drops any of them.
    """
    where = harmful(log_ratio, advantages, loss_mask).nonzero().squeeze(-1)
    squares, order = log_ratio.detach()[where].double().square().sort()
    allowed = threshold * torch.arange(1, len(squares) + 1, device=squares.device)
    # The mean of the smallest k never falls as k grows, so that the tokens to drop are a tail.
    return torch.ones_like(loss_mask).index_put((where[order],), squares.cumsum(0) <= allowed)


def sat_gate(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, quantile: float, eps_low: float, eps_high: float
) -> Tensor:
    """SAT (2607.18722): PPO's clip with a narrower bound for the tokens furthest from mu; belongs under coef clip.

    With q the ``quantile`` of |log r| over the mask, a token with |log r| > q has its eps multiplied by q / |log r|:
    continuous at q, and smaller the further the token drifted. Only the bound on the side of A's sign is narrowed, 1 +
    eps_high for A > 0 and 1 - eps_low for A < 0, so that the interval lies within PPO's. The paper's summary, on which
    this is based, does not give the amount; this one is our choice.
    """
    drift = masked_values(log_ratio.detach(), loss_mask)
    sizes = drift[loss_mask].abs()
    if not len(sizes):
        return torch.ones_like(loss_mask)
    bound = percentile(sizes, quantile)
    room = torch.where(drift.abs() > bound, bound / drift.abs(), 1.0)
    over = (advantages > 0) & (drift > (eps_high * room).log1p())
    under = (advantages < 0) & (drift < (-eps_low * room).log1p())
    return ~(over | under)


class GateInputs(NamedTuple):
    """What a gate of ``GATES`` sees of a microbatch: [T] each."""

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    entropy: Tensor  # of the policy, in nats
    advantages: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor


def opsm_gate(x: GateInputs, delta: float) -> Tensor:
    """Off-policy sequence mask (2512.02556): drops a sequence's tokens with A < 0 where mean_t(mu - theta) > ``delta``.

    ``delta`` is in nats per token.
    """
    drift = log_ratio_at(x.behavior_logprobs, x.policy_logprobs, x.loss_mask, x.sequence_ids, "geo")
    return ~((x.advantages < 0) & (drift > delta))


def binary_kl_gate(x: GateInputs, delta: float) -> Tensor:
    """FlashREINFORCE: drops a sequence, whatever its advantages, whose tokens' mean binary KL is > ``delta`` nats.

    A token's is the KL of "this token or another" under mu to that under pi: p log(p / q) + (1 - p) log((1 - p) /
    (1 - q)), exact but for 1 - p and 1 - q, held at ``REST_NOISE``. The authors' code (NVIDIA-NeMo/labs-molt) holds p
    and q there too, so that a token which pi calls all but impossible counts less.
    """
    mu, pi = (masked_values(p.detach(), x.loss_mask).double() for p in (x.behavior_logprobs, x.policy_logprobs))
    rest_mu, rest_pi = (p.expm1().neg().clamp(min=REST_NOISE) for p in (mu, pi))
    divergence = mu.exp() * (mu - pi) + rest_mu * (rest_mu / rest_pi).log()
    return segment_total(divergence, x.sequence_ids) / sequence_lengths(x.loss_mask, x.sequence_ids) <= delta


def entropy_gate(x: GateInputs, delta: float) -> Tensor:
    """ESTR (2607.22186): drops tokens with (log pi / mu)^2 > ``delta`` (entropy + ``ENTROPY_FLOOR``).

    How far log pi / mu strays for the same change of logits grows with the root of the token's entropy, so that one
    bound for all is loose where the policy is certain and tight where it is not. The paper's entropy is the sampler's,
    which no engine but our own could hand out; ours is that of the policy in the same pass.
    """
    drift = log_ratio_at(x.policy_logprobs, x.behavior_logprobs, x.loss_mask, x.sequence_ids, "token")
    return drift.square() <= delta * (masked_values(x.entropy.detach(), x.loss_mask).clamp(min=0.0) + ENTROPY_FLOOR)


GATES = {"opsm": opsm_gate, "binary_kl": binary_kl_gate, "entropy": entropy_gate}
