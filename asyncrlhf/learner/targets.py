"""What a step aims at and what it found: advantages, anchors, behavior weights; the record of its forward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrlhf.algorithms.advantages import SEQUENCE_ADVANTAGES, broadcast, gae, terminal_rewards, vstar, vtrace
from asyncrlhf.algorithms.kl import kl_sequence_rewards, kl_token_rewards
from asyncrlhf.algorithms.masked import moments, whiten
from asyncrlhf.algorithms.weights import behavior_weight, interpolated_proximal, target_anchor
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.forward import TokenFacts
from asyncrlhf.learner.plan import ResponseTokens


@dataclass
class StepRecord:
    """Detached values of the M response tokens of a rank."""

    policy: torch.Tensor  # [M] of the last pass
    proximal: torch.Tensor  # [M] of the first pass, before any update
    entropy: torch.Tensor  # [M] of the last pass
    collision: torch.Tensor  # [M] of the last pass, where the policy gives it
    clipped: torch.Tensor  # [M] share of the passes in which the clip rule or a gate acted
    kept_mass: torch.Tensor  # [M] of the first pass, where sampling was truncated; 0 before it

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> StepRecord:
        return cls(*(torch.zeros(tokens, device=device) for _ in range(6)))

    def keep(self, span: slice, facts: TokenFacts) -> None:
        self.policy[span] = facts.logprobs.detach()
        self.entropy[span] = facts.entropies.detach()
        if len(facts.collision):
            self.collision[span] = facts.collision
        if len(facts.kept_mass):
            first = self.kept_mass[span]
            self.kept_mass[span] = torch.where(first > 0, first, facts.kept_mass.to(first))

    def facts(self, span: slice) -> TokenFacts:
        """What was kept, without gradient."""
        return TokenFacts(self.policy[span], self.entropy[span], self.collision[span], self.kept_mass[span])


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
    """What forward passes found before the first update, log-probs and values [M]; None where not needed."""

    ref: torch.Tensor | None = None
    ema: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    values: torch.Tensor | None = None
    final_values: torch.Tensor | None = None  # [N] of the state behind an answer that was cut; 0 behind one that ended


SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def build_targets(
    tokens: ResponseTokens, config: AlgorithmConfig, passes: Passes, sum_over_ranks: SumOverRanks
) -> Targets:
    """The targets of a step. Whole groups must lie on this rank; whitening takes its moments over all ranks.

    A KL in the reward is that of the present (proximal) policy: a token at a time with a critic and in REINFORCE++,
    where a token answers for the KL from itself on, and summed onto the sequence's reward otherwise.
    """
    ids, mask = tokens.sequence_ids, tokens.loss_mask
    rewards, returns = tokens.rewards, None
    if passes.values is not None:
        advantages, returns = _critic_advantages(tokens, config, passes)
    elif config.advantage == "whiten":
        nothing = torch.zeros_like(tokens.behavior)
        advantages, _ = gae(_token_rewards(tokens, config, passes), nothing, mask, ids, gamma=config.gamma)
    else:
        if config.kl == "reward":
            policy, ref = _penalised(passes)
            rewards = kl_sequence_rewards(rewards, policy, ref, mask, ids, beta=config.beta)
        advantages = broadcast(_sequence_advantages(rewards, tokens.group_ids, config), ids)
    if config.whiten or config.advantage == "whiten":
        advantages = whiten(advantages, mask, sum_over_ranks(moments(advantages, mask)))
    return Targets(
        rewards, advantages, returns, passes.values, ref=passes.ref, ema=passes.ema, proximal=passes.proximal
    )


def _penalised(passes: Passes) -> tuple[torch.Tensor, torch.Tensor]:
    """The two policies of a KL in the reward: (present, reference) log-probs [M]."""
    assert passes.proximal is not None and passes.ref is not None
    return passes.proximal, passes.ref


def _token_rewards(tokens: ResponseTokens, config: AlgorithmConfig, passes: Passes) -> torch.Tensor:
    """[M]: the score on the last token, less the KL penalty of each. Where the critic's value stands for the rest of an
    answer that was cut, it also stands for its score: both would count what the answer is worth twice."""
    scores = tokens.rewards
    if config.truncated == "bootstrap":
        scores = scores.masked_fill(tokens.truncated, 0.0)
    rewards = terminal_rewards(scores, tokens.loss_mask, tokens.sequence_ids)
    if config.kl != "reward":
        return rewards
    return kl_token_rewards(rewards, *_penalised(passes), tokens.loss_mask, beta=config.beta)


def _critic_advantages(
    tokens: ResponseTokens, config: AlgorithmConfig, passes: Passes
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [M], value targets [M]).

    V-trace's ratio is that of the anchor's slow network where there is one (IMPACT, 1912.00167), and of the proximal
    policy otherwise. Under a correction GAE's targets are V-trace's too, with rho cut where the correction cuts: the
    weights of a regression on whole returns would be products over all tokens to come, whose variance grows
    exponentially with the answer's length, while V-trace's traces are cut at 1 without moving the fixed point.
    """
    ids, mask, values = tokens.sequence_ids, tokens.loss_mask, passes.values
    assert values is not None
    rewards = _token_rewards(tokens, config, passes)
    common = {"gamma": config.gamma, "lam": config.lam, "c_bar": config.c_bar}
    if config.advantage == "gae":
        ratio = None
        if config.corrects_values:
            assert passes.proximal is not None
            ratio = passes.proximal - tokens.behavior
        bound = {"rho_bar": config.correction_high}
        return gae(rewards, values, mask, ids, final_values=passes.final_values, log_ratio=ratio, **common, **bound)
    target = passes.proximal if passes.ema is None else passes.ema
    assert target is not None
    return vtrace(
        rewards,
        values,
        target - tokens.behavior,
        mask,
        ids,
        final_values=passes.final_values,
        rho_bar=config.rho_bar,
        **common,
    )


def _sequence_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """[N]; zeros where each update fills in its own."""
    if config.head != "policy" or config.advantage == "opob":
        return torch.zeros_like(rewards)
    if config.advantage == "vstar":
        return vstar(rewards, group_ids, beta=config.vstar_beta)
    options = {"group_norm": {"eps": config.advantage_eps}, "group_mean": {"shift": config.advantage_shift}}
    return SEQUENCE_ADVANTAGES[config.advantage](rewards, group_ids, **options.get(config.advantage, {}))


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
