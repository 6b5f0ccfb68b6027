"""What a step aims at: advantages, value targets, the policy between theta and mu, behavior weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrlhf.algorithms.advantages import SEQUENCE_ADVANTAGES, broadcast, gae, terminal_rewards, vstar, vtrace
from asyncrlhf.algorithms.kl import kl_sequence_rewards, kl_token_rewards
from asyncrlhf.algorithms.masked import moments, whiten
from asyncrlhf.algorithms.weights import behavior_weight, interpolated_proximal, target_anchor
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.plan import ResponseTokens


def set_targets(
    tokens: ResponseTokens, config: AlgorithmConfig, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the step's rewards, advantages and value targets, from what passes found before the first update; room for
    what ``lookahead.fill`` writes. Whole groups must lie on this rank; whitening takes its moments over all ranks.

    A KL in the reward is that of the present (proximal) policy: a token at a time with a critic and in REINFORCE++,
    where a token answers for the KL from itself on, and summed onto the sequence's reward otherwise.
    """
    ids, mask = tokens.sequence_ids, tokens.loss_mask
    if tokens.values is not None:
        tokens.advantages, tokens.returns = _critic_advantages(tokens, config)
    elif config.advantage == "whiten":
        nothing = torch.zeros_like(tokens.behavior_logprobs)
        tokens.advantages, _ = gae(_token_rewards(tokens, config), nothing, mask, ids, gamma=config.gamma)
    else:
        if config.kl == "reward":
            tokens.rewards = kl_sequence_rewards(tokens.rewards, *_penalised(tokens), mask, ids, beta=config.beta)
        tokens.advantages = broadcast(_sequence_advantages(tokens.rewards, tokens.group_ids, config), ids)
    if config.whiten or config.advantage == "whiten":
        total = sum_over_ranks(moments(tokens.advantages, mask))
        tokens.advantages = whiten(tokens.advantages, mask, total)
    if config.gate in ("m2", "sat"):
        tokens.gate = torch.ones_like(tokens.advantages, dtype=torch.bool)
    if config.head != "policy":
        tokens.head_losses = torch.zeros_like(tokens.rewards)


def _penalised(tokens: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The two policies of a KL in the reward: (present, reference) log-probs [M]."""
    assert tokens.proximal_logprobs is not None and tokens.ref_logprobs is not None
    return tokens.proximal_logprobs, tokens.ref_logprobs


def _token_rewards(tokens: ResponseTokens, config: AlgorithmConfig) -> torch.Tensor:
    """[M]: the score on the last token, less the KL penalty of each. Where the critic's value stands for the rest of an
    answer that was cut, it also stands for its score: both would count what the answer is worth twice."""
    scores = tokens.rewards
    if config.truncated == "bootstrap":
        scores = scores.masked_fill(tokens.truncated, 0.0)
    rewards = terminal_rewards(scores, tokens.loss_mask, tokens.sequence_ids)
    if config.kl != "reward":
        return rewards
    return kl_token_rewards(rewards, *_penalised(tokens), tokens.loss_mask, beta=config.beta)


def _critic_advantages(tokens: ResponseTokens, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [M], value targets [M]).

    V-trace's ratio is that of the anchor's slow network where there is one (IMPACT, 1912.00167), and of the proximal
    policy otherwise. Under a correction GAE's targets are V-trace's too, with rho cut where the correction cuts: the
    weights of a regression on whole returns would be products over all tokens to come, whose variance grows
    exponentially with the answer's length, while V-trace's traces are cut at 1 without moving the fixed point.
    """
    assert tokens.values is not None
    given = (_token_rewards(tokens, config), tokens.values)
    where = (tokens.loss_mask, tokens.sequence_ids)
    common = {"gamma": config.gamma, "lam": config.lam, "c_bar": config.c_bar, "final_values": tokens.final_values}
    target = tokens.proximal_logprobs
    if config.advantage == "gae":
        ratio = target - tokens.behavior_logprobs if config.corrects_values and target is not None else None
        return gae(*given, *where, log_ratio=ratio, rho_bar=config.correction_high, **common)  # type: ignore[arg-type]
    target = target if tokens.ema_logprobs is None else tokens.ema_logprobs
    assert target is not None
    ratio = target - tokens.behavior_logprobs
    return vtrace(*given, ratio, *where, rho_bar=config.rho_bar, **common)  # type: ignore[arg-type]


def _sequence_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """[N]; zeros where each update fills in its own."""
    if config.head != "policy" or config.advantage == "opob":
        return torch.zeros_like(rewards)
    if config.advantage == "vstar":
        return vstar(rewards, group_ids, beta=config.vstar_beta)
    options = {"group_norm": {"eps": config.advantage_eps}, "group_mean": {"shift": config.advantage_shift}}
    return SEQUENCE_ADVANTAGES[config.advantage](rewards, group_ids, **options.get(config.advantage, {}))


def proximal_of(config: AlgorithmConfig, tokens: ResponseTokens) -> torch.Tensor:
    """The policy [m] that stands between theta and mu: the slow network (not below mu / ``ema_ratio_cap``), the
    interpolation, or theta before the step.

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
    return behavior_weight(
        proximal_of(config, tokens),
        tokens.behavior_logprobs,
        tokens.loss_mask,
        tokens.sequence_ids,
        level=config.correction_level,
        mode=config.correction,
        low=config.correction_low,
        high=config.correction_high,
        ratio_bound=config.largest_ratio,
    )
