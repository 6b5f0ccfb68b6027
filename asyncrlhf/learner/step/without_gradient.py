"""Sequences whose loss has no gradient whatever the policy: a forward pass for the metrics is all that they need."""

from __future__ import annotations

import numpy as np
import torch

from asyncrlhf.algorithms.heads import pair
from asyncrlhf.algorithms.masked import group_reduce
from asyncrlhf.learner.settings.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from asyncrlhf.learner.step.segments import flat_turns
from asyncrlhf.types import TrainBatch


def zero_gradient_sequences(batch: TrainBatch, config: AlgorithmConfig) -> np.ndarray:
    """Sequences [N] whose loss has no gradient for any policy, such as those of groups without reward spread."""
    none = np.zeros(batch.num_sequences, dtype=np.bool_)
    others = config.kl != "none" or config.whiten or config.entropy_coef > 0 or bool(config.loss.target)
    if others or batch.num_sequences == 0:
        return none
    if config.head == "pair":
        # Only the rewards decide which rollouts form a pair and which is best.
        rewards, group_ids = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_ids)
        chosen, _ = pair(torch.zeros_like(rewards), rewards, group_ids, beta=config.beta, kind=config.pair_loss)
        return (chosen == 0).numpy()
    relative = config.advantage in GROUP_ADVANTAGES and config.advantage_shift == 0
    if config.head == "policy" and (relative or config.advantage == "raw"):
        if config.credit == "turn":
            return flat_turns(batch, gamma=config.gamma, relative=relative)
        return flat_groups(batch) if relative else batch.rewards == 0
    return none


def flat_groups(batch: TrainBatch) -> np.ndarray:
    """Sequences [N] whose group has one and the same reward throughout."""
    rewards, group_ids = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_ids)
    return (group_reduce(rewards, group_ids, "amin") == group_reduce(rewards, group_ids, "amax")).numpy()
