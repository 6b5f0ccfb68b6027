"""The targets of a step on a batch's shares, and the critic's loss, without a model."""

from __future__ import annotations

import pytest
import torch

from asyncrlhf.algorithms.masked import moments
from asyncrlhf.data.packing import pack
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.loss import critic_loss
from asyncrlhf.learner.step.plan import ResponseTokens, plan_step
from asyncrlhf.learner.step.targets import set_targets
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.worlds import samples, share

CPU = torch.device("cpu")


def test_two_ranks_whiten_by_the_moments_of_both() -> None:
    config = AlgorithmConfig(advantage="group_mean", whiten=True)
    batch, plain = pack(samples()), AlgorithmConfig(advantage="group_mean")

    def tokens(rank: int) -> ResponseTokens:
        return plan_step(share(batch, rank, 2), config, 10**6, CPU).tokens

    before = [tokens(rank) for rank in range(2)]
    for part in before:
        set_targets(part, plain, lambda total: total)
    total = sum(moments(part.advantages, part.loss_mask) for part in before)
    whitened = []
    for rank in range(2):
        part = tokens(rank)
        set_targets(part, config, lambda own: total)  # what the ranks' sum gives to each of them
        whitened.append(part.advantages[part.loss_mask])
    assert_close(torch.cat(whitened).mean(), 0.0, atol=FLOAT32)
    assert_close(torch.cat(whitened).std(), 1.0, atol=FLOAT32)


@pytest.mark.parametrize(("clip", "expected"), [(0.05, 0.25**2 / 2), (0.2, 0.2**2 / 2)])
def test_the_value_loss_is_clipped_by_value_clip(clip: float, expected: float) -> None:
    config = AlgorithmConfig(advantage="gae", epsilon=0.2, value_clip=clip)
    tokens = plan_step(pack(samples()), config, 10**6, CPU).tokens
    count = len(tokens.loss_mask)
    tokens.weights.fill_(1.0)
    tokens.values, tokens.returns = torch.zeros(count), torch.full((count,), 0.3)
    loss = critic_loss(config, tokens, torch.full((count,), 0.5), tokens.loss_mask.sum())
    assert_close(loss, expected, atol=FLOAT32)
