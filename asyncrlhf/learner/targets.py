"""What a step's losses aim at: advantages, anchors and behavior weights, from rewards and the policies' log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrlhf.algorithms.advantages import SEQUENCE_ADVANTAGES, broadcast, gae, terminal_rewards, vstar, vtrace
from asyncrlhf.algorithms.kl import kl_sequence_rewards, kl_token_rewards
from asyncrlhf.algorithms.masked import moments, whiten
from asyncrlhf.algorithms.weights import behavior_weight, interpolated_proximal, target_anchor
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.plan import ResponseTokens


@dataclass
class Targets:
    """What the losses of a step need beside the policy of the pass.

    ``advantages``, ``gate`` and ``head_losses`` are fixed before the first update, unless the algorithm looks at the
    whole of an update with the present policy: then ``lookahead.fill`` writes that update's part each time.
    """

    rewards: torch.Tensor  # [N] less a KL penalty, where one is counted in the reward
    advantages: torch.Tensor  # [M]
    returns: torch.Tensor | None = None  # [M] with a critic
    old_values: torch.Tensor | None = None  # [M] with a critic
    ref: torch.Tensor | None = None  # [M] reference log-probs
    ema: torch.Tensor | None = None  # [M] the target network's log-probs
    proximal: torch.Tensor | None = None  # [M] None: the policy of the pass itself, which has not moved yet
    gate: torch.Tensor | None = None  # [M] bool, tokens that are kept
    head_losses: torch.Tensor | None = None  # [N]


@dataclass(frozen=True)
class Passes:
    """Log-probs and values [M] that forward passes found before the first update; None where nobody asked."""

    ref: torch.Tensor | None = None
    ema: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    values: torch.Tensor | None = None


SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def build_targets(
    tokens: ResponseTokens, config: AlgorithmConfig, passes: Passes, sum_over_ranks: SumOverRanks
) -> Targets:
    """The targets of a step. Whole groups must lie on this rank; whitening takes its moments over all ranks.

    A KL in the reward is that of the policy that sampled the tokens, so it needs no forward pass of its own: per token
    with a critic, summed onto the sequence's reward otherwise.
    """
    ids, mask = tokens.sequence_ids, tokens.loss_mask
    rewards, returns = tokens.rewards, None
    penalty = config.beta if config.kl == "reward" else 0.0
    if passes.values is not None:
        advantages, returns = _critic_advantages(tokens, config, passes, penalty)
    else:
        if penalty and passes.ref is not None:
            rewards = kl_sequence_rewards(
                rewards,
                tokens.behavior,
                passes.ref,
                mask,
                ids,
                beta=penalty,
                estimator=config.kl_estimator,
                ratio_bound=config.largest_ratio,
            )
        advantages = broadcast(_sequence_advantages(rewards, tokens.group_ids, config), ids)
    if config.whiten or config.advantage == "whiten":
        advantages = whiten(advantages, mask, sum_over_ranks(moments(advantages, mask)))
    return Targets(
        rewards, advantages, returns, passes.values, ref=passes.ref, ema=passes.ema, proximal=passes.proximal
    )


def _critic_advantages(
    tokens: ResponseTokens, config: AlgorithmConfig, passes: Passes, penalty: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [M], returns [M]). V-trace's ratio is that of the anchor's slow network where there is one
    (IMPACT, 1912.00167), and of the proximal policy otherwise."""
    ids, mask, values = tokens.sequence_ids, tokens.loss_mask, passes.values
    assert values is not None
    rewards = terminal_rewards(tokens.rewards, mask, ids)
    if penalty and passes.ref is not None:
        rewards = kl_token_rewards(
            rewards,
            tokens.behavior,
            passes.ref,
            mask,
            beta=penalty,
            estimator=config.kl_estimator,
            ratio_bound=config.largest_ratio,
        )
    if config.advantage == "gae":
        return gae(rewards, values, mask, ids, gamma=config.gamma, lam=config.lam)
    target = passes.proximal if passes.ema is None else passes.ema
    assert target is not None
    return vtrace(
        rewards,
        values,
        target - tokens.behavior,
        mask,
        ids,
        gamma=config.gamma,
        lam=config.lam,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
    )


def _sequence_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """[N]; zeros where each update fills in its own."""
    if config.head != "policy" or config.advantage == "opob":
        return torch.zeros_like(rewards)
    if config.advantage == "vstar":
        return vstar(rewards, group_ids, beta=config.vstar_beta)
    name = "raw" if config.advantage == "whiten" else config.advantage
    options = {"group_norm": {"eps": config.advantage_eps}, "group_mean": {"shift": config.advantage_shift}}
    return SEQUENCE_ADVANTAGES[name](rewards, group_ids, **options.get(name, {}))


def proximal_of(
    config: AlgorithmConfig,
    policy: torch.Tensor,
    behavior: torch.Tensor,
    version_lag: torch.Tensor,
    proximal: torch.Tensor | None,
    ema: torch.Tensor | None,
) -> torch.Tensor:
    """The policy [m] that stands between theta and mu: the slow network (not below mu / ``ema_ratio_cap``), the
    interpolation, or theta before the step.

    It is the clip's anchor under ``prox``, ``prox_interp`` and ``ema``, and the numerator of the behavior weight.
    """
    if ema is not None:
        return target_anchor(ema, behavior, config.ema_ratio_cap) if config.ema_ratio_cap else ema
    if config.anchor == "prox_interp":
        return interpolated_proximal(policy.detach(), behavior, version_lag)
    return policy.detach() if proximal is None else proximal


def correction_weight(
    config: AlgorithmConfig, proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The behavior weight under the settings of ``algorithm.correction``."""
    return behavior_weight(
        proximal,
        behavior,
        mask,
        ids,
        level=config.correction_level,
        mode=config.correction,
        low=config.correction_low,
        high=config.correction_high,
        ratio_bound=config.largest_ratio,
    )
