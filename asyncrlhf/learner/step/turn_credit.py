"""``algorithm.credit=turn``: a step's turns as segments, with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrlhf.algorithms.advantages import broadcast
from asyncrlhf.algorithms.masked import masked_values
from asyncrlhf.learner.settings.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from asyncrlhf.learner.step.plan import ResponseTokens
from asyncrlhf.learner.step.segments import NO_TURNS, Segments, relative, segment_returns


def turns_of(tokens: ResponseTokens) -> Segments:
    """The turns of all episodes of this rank."""
    assert tokens.turns is not None, NO_TURNS
    return Segments.of(tokens.turns, tokens.sequence_ids)


def turn_rewards(tokens: ResponseTokens, config: AlgorithmConfig) -> torch.Tensor:
    """[M]: each turn's reward on its last token. The critic's value of what follows a cut stands for the reward of the
    last turn too, which the environment gives after it."""
    assert tokens.turn_rewards is not None, NO_TURNS
    if config.truncated != "bootstrap":
        return tokens.turn_rewards
    return turns_of(tokens).without_last(tokens.turn_rewards, tokens.truncated)


def turn_advantages(
    token_rewards: torch.Tensor,
    tokens: ResponseTokens,
    config: AlgorithmConfig,
    rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[M], without a critic: each turn's return, which ``rule`` measures against the same turn of the siblings if the
    algorithm compares them."""
    turns = turns_of(tokens)
    gains = segment_returns(token_rewards, turns, gamma=config.gamma)
    if config.advantage in GROUP_ADVANTAGES:
        gains = relative(gains, turns, tokens.group_ids, rule, leave_one_out=config.advantage == "loo")
    return masked_values(broadcast(gains, turns.of_token), tokens.loss_mask)
