"""The targets of a step: advantages, value targets, the policy between theta and mu, behavior weights.

Some algorithms need a whole optimizer update under the present policy before its backward pass. Gates use all tokens of
the update on all ranks; the minimum-variance baseline and the heads use whole groups, which are on one rank but may be
spread over its microbatches. Therefore passes are recorded first and ``fill`` writes the update's gate, advantages or
head coefficients; microbatches then only read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asyncrlhf.algorithms.advantages import (
    SEQUENCE_ADVANTAGES,
    batch_mean,
    broadcast,
    gae,
    opob,
    score_norms,
    terminal_rewards,
    vstar,
    vtrace,
)
from asyncrlhf.algorithms.diagnostics import weight_diagnostics
from asyncrlhf.algorithms.gates import m2_gate, sat_gate
from asyncrlhf.algorithms.heads import pair, regress
from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.masked import masked_values, moments, segment_sum, whiten
from asyncrlhf.algorithms.statistics import together
from asyncrlhf.algorithms.weights import behavior_weight, interpolated_proximal, target_anchor
from asyncrlhf.learner.ranks import Peers, all_gather
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.plan import Microbatch, ResponseTokens
from asyncrlhf.learner.step.segments import segment_gae
from asyncrlhf.learner.step.turn_credit import turn_advantages, turn_rewards

# A rejected sequence has weight 0; its logarithm only has to be far below that of any other.
LOG_OF_ZERO = -80.0


def set_targets(
    tokens: ResponseTokens, config: AlgorithmConfig, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the step's rewards, advantages and value targets from the passes before the first update, and allocate the
    arrays that :func:`fill` writes. Whole groups must lie on this rank; moments are taken over all ranks.

    A KL in the reward is that of the present (proximal) policy: per token with a critic and in REINFORCE++, where a
    token's return includes the KL from that token on; otherwise its sum goes into the sequence's reward.
    """
    ids, mask = tokens.sequence_ids, tokens.loss_mask
    if tokens.values is not None:
        tokens.advantages, tokens.returns = _critic_advantages(tokens, config)
    elif config.credit == "turn":
        rule = partial(_sequence_advantages, config=config)
        tokens.advantages = turn_advantages(_token_rewards(tokens, config), tokens, config, rule)
    elif config.advantage == "whiten":
        nothing = torch.zeros_like(tokens.behavior_logprobs)
        tokens.advantages, _ = gae(_token_rewards(tokens, config), nothing, mask, ids, gamma=config.gamma)
    else:
        if config.kl == "reward":
            penalties = segment_sum(_penalty(tokens), ids, len(tokens.rewards))
            tokens.rewards = tokens.rewards - config.beta * penalties.to(tokens.rewards.dtype)
        if config.advantage == "batch_mean":
            every = torch.ones_like(tokens.rewards, dtype=torch.bool)
            gains = batch_mean(tokens.rewards, sum_over_ranks(moments(tokens.rewards, every)))
        else:
            gains = _sequence_advantages(tokens.rewards, tokens.group_ids, config)
        tokens.advantages = broadcast(gains, ids)
    if config.whiten or config.advantage == "whiten":
        total = sum_over_ranks(moments(tokens.advantages, mask))
        tokens.advantages = whiten(tokens.advantages, mask, total)
    if config.gate in ("m2", "sat"):
        tokens.gate = torch.ones_like(tokens.advantages, dtype=torch.bool)
    if config.head != "policy":
        tokens.head_losses = torch.zeros_like(tokens.rewards)


def _penalty(tokens: ResponseTokens) -> torch.Tensor:
    """Each token's KL in the reward, of the present policy from the reference: [M]. The sampler's own log-probs would
    leave out how far the policy has moved since."""
    assert tokens.proximal_logprobs is not None and tokens.ref_logprobs is not None
    with torch.no_grad():
        return kl_estimate(tokens.proximal_logprobs, tokens.ref_logprobs, tokens.loss_mask, estimator="k1")


def _token_rewards(tokens: ResponseTokens, config: AlgorithmConfig) -> torch.Tensor:
    """[M]: the score on the last token, or each turn's on its own, minus the KL penalty of each. If the critic's value
    replaces the rest of a truncated answer, it replaces its score (of its last turn) too: both together would count the
    answer's worth twice."""
    if config.credit == "turn":
        rewards = turn_rewards(tokens, config)
    else:
        cut = tokens.truncated & (config.truncated == "bootstrap")
        rewards = terminal_rewards(tokens.rewards.masked_fill(cut, 0.0), tokens.loss_mask, tokens.sequence_ids)
    return rewards - config.beta * _penalty(tokens) if config.kl == "reward" else rewards


def _critic_advantages(tokens: ResponseTokens, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [M], value targets [M]).

    V-trace's ratio is that of the anchor's slow network where there is one (IMPACT, 1912.00167), and of the proximal
    policy otherwise. Under a correction GAE's targets are V-trace's too, with rho cut where the correction cuts: the
    weights of a regression on whole returns would be products over all tokens to come, whose variance grows
    exponentially with the answer's length, while V-trace's traces are cut at 1 without moving the fixed point.
    """
    assert tokens.values is not None
    by_vtrace, ema = config.advantage == "vtrace", tokens.ema_logprobs
    target = ema if by_vtrace and ema is not None else tokens.proximal_logprobs
    ratio = target - tokens.behavior_logprobs if target is not None and (by_vtrace or config.corrects_values) else None
    rule: Callable[..., tuple[torch.Tensor, torch.Tensor]] = vtrace if by_vtrace else gae
    if config.credit == "turn":
        rule = partial(segment_gae, numbers=tokens.turns, rule=rule)  # type: ignore[arg-type]
    how = {"gamma": config.gamma, "lam": config.lam, "c_bar": config.c_bar, "final_values": tokens.final_values}
    how |= {"rho_bar": config.rho_bar if by_vtrace else config.correction_high, "log_ratio": ratio}
    where = {"loss_mask": tokens.loss_mask, "sequence_ids": tokens.sequence_ids}
    return rule(_token_rewards(tokens, config), tokens.values, **where, **how)


def _sequence_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """[N]; zeros without an advantage, and where each update fills in its own."""
    if config.head != "policy" or config.advantage in ("opob", "none"):
        return torch.zeros_like(rewards)
    if config.advantage == "vstar":
        return vstar(rewards, group_ids, beta=config.vstar_beta)
    options = {"shift": config.advantage_shift} if config.advantage == "group_mean" else {}
    return SEQUENCE_ADVANTAGES[config.advantage](rewards, group_ids, **options)


def proximal_of(config: AlgorithmConfig, tokens: ResponseTokens) -> torch.Tensor:
    """The policy [m] between theta and mu: the slow network (not below mu / ``ema_ratio_cap``), the interpolation, or
    theta before the step.

    It is the clip's anchor under ``prox``, ``prox_interp`` and ``ema``, and the numerator of the behavior weight.
    """
    policy, behavior = tokens.policy_logprobs.detach(), tokens.behavior_logprobs
    if tokens.ema_logprobs is not None:
        cap = config.ema_ratio_cap
        return target_anchor(tokens.ema_logprobs, behavior, cap) if cap else tokens.ema_logprobs
    if config.anchor == "prox_interp":
        return interpolated_proximal(policy, behavior, tokens.version_lag)
    return policy if tokens.proximal_logprobs is None else tokens.proximal_logprobs


def correction_weight(config: AlgorithmConfig, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The behavior weight under the settings of ``algorithm.correction``."""
    where = (proximal_of(config, tokens), tokens.behavior_logprobs, tokens.loss_mask, tokens.sequence_ids)
    how: dict[str, Any] = {"level": config.correction_level, "mode": config.correction}
    how |= {"low": config.correction_low, "high": config.correction_high, "ratio_bound": config.largest_ratio}
    return behavior_weight(*where, **how)


def fills(config: AlgorithmConfig) -> bool:
    """Whether the algorithm computes separate targets for each update."""
    return config.head != "policy" or config.gate in ("m2", "sat") or config.advantage == "opob"


def needs_policy(config: AlgorithmConfig) -> bool:
    """Whether these targets depend on the present policy; the best rollout of a group does not."""
    return fills(config) and not (config.head == "pair" and config.pair_loss == "best")


def sequence_ess_fraction(tokens: ResponseTokens, proximal: torch.Tensor, peers: Peers) -> float:
    """ESS of the step's sequences over their number, from the products of prox / mu, on all ranks and not cut."""
    found = weight_diagnostics(proximal - tokens.behavior_logprobs, tokens.loss_mask, tokens.sequence_ids)
    return float(together(all_gather(found, peers))["sequence_ess_fraction"])


@torch.no_grad()
def fill(config: AlgorithmConfig, tokens: ResponseTokens, update: Sequence[Microbatch], peers: Peers) -> None:
    """Write the targets of ``update`` from the recorded passes of the present policy.

    All ranks call it together, including one whose share of the update is empty.
    """
    part = tokens.part(update)
    if part.gate is not None:
        part.gate.copy_(_gate(config, part, peers))
    if not update:
        return
    if config.advantage == "opob":
        part.advantages.copy_(broadcast(_opob(config, part), part.sequence_ids))
    if part.head_losses is not None:
        coefficients, losses = _head(config, part)
        part.advantages.copy_(broadcast(coefficients, part.sequence_ids))
        part.head_losses.copy_(losses)


def _gate(config: AlgorithmConfig, part: ResponseTokens, peers: Peers) -> torch.Tensor:
    """This rank's part of the gate over the update's tokens of all ranks: [m] bool."""
    mask = part.loss_mask
    log_ratio = masked_values(part.policy_logprobs - part.behavior_logprobs, mask)
    shares = all_gather((log_ratio, part.advantages, mask), peers)
    ratios, gains, masks = (torch.cat(pieces) for pieces in zip(*shares, strict=True))
    if config.gate == "m2":
        keep = m2_gate(ratios, gains, masks, threshold=config.off_policy_mask_threshold)
    else:
        bounds = {"eps_low": config.epsilon, "eps_high": config.epsilon_high}
        keep = sat_gate(ratios, gains, masks, quantile=config.sat_quantile, **bounds)
    return keep.split([len(share[0]) for share in shares])[peers.rank].to(mask.device)


def _opob(config: AlgorithmConfig, part: ResponseTokens) -> torch.Tensor:
    """[n]. The weights are those of the loss, with the same caps: the baseline is optimal for the estimator in use."""
    mask, ids, count = part.loss_mask, part.sequence_ids, len(part.rewards)
    log_weights = torch.zeros_like(part.rewards)
    if config.correction != "none":
        per_token = correction_weight(config, part)[0].log().clamp(min=LOG_OF_ZERO)
        lengths = segment_sum(mask.long(), ids, count).clamp(min=1)
        log_weights = segment_sum(masked_values(per_token, mask), ids, count) / lengths
    norms = score_norms(part.policy_logprobs, part.collision, mask, ids, count)
    return opob(part.rewards, part.group_ids, log_weights=log_weights, score_norms=norms)


def _head(config: AlgorithmConfig, part: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficients [n], losses [n])."""
    anchor = {"ref": part.ref_logprobs, "mu": part.behavior_logprobs}.get(config.anchor)
    log_ratio = torch.zeros_like(part.policy_logprobs) if anchor is None else part.policy_logprobs - anchor
    sums = segment_sum(masked_values(log_ratio, part.loss_mask), part.sequence_ids, len(part.rewards))
    given = (sums, part.rewards, part.group_ids)
    if config.head == "pair":
        return pair(*given, beta=config.beta, kind=config.pair_loss)
    return regress(*given, beta=config.beta, target=config.regress_target, vstar_beta=config.vstar_beta)
