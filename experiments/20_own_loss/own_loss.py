"""A policy loss of one's own: PPO's objective with a smooth bound on the ratio in place of the hard clip."""

from __future__ import annotations

import torch

from asyncrlhf.learner.step.user_loss import LossInputs

WIDTH = 0.2  # the log-ratio is held within +-WIDTH
CAP = 2.0  # on the weight that corrects for the behavior policy


def smooth_clip(inputs: LossInputs) -> torch.Tensor:
    """-w A exp(WIDTH tanh(log r / WIDTH)) a token: [T]. The gradient fades as the ratio moves away, and never jumps."""
    log_ratio = inputs.policy_logprobs - inputs.proximal_logprobs
    held = WIDTH * torch.tanh(log_ratio / WIDTH)
    weight = (inputs.proximal_logprobs - inputs.behavior_logprobs).exp().clamp(max=CAP)
    return -weight * inputs.advantages * held.exp()
