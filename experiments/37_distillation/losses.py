"""Estimators of a distillation's gradient that the package does not have, as losses of a user's own."""

from __future__ import annotations

from torch import Tensor

from asyncrlhf.learner.step.user_loss import LossInputs

CAP = 5.0


def sampled_advantage(tokens: LossInputs) -> Tensor:
    """[M] reverse KL with the advantage log q - log mu, fixed when the token was sampled, under the weight pi / mu (at
    most CAP): an on-policy recipe whose samples became old."""
    assert tokens.ref_logprobs is not None
    ratio = (tokens.policy_logprobs - tokens.behavior_logprobs).exp().clamp(max=CAP)
    return -ratio * (tokens.ref_logprobs - tokens.behavior_logprobs)
