"""Warns if ``algorithm.coef=signed``, which treats negative advantages differently, never meets one."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.rewards.reward_config import RewardConfig

METRIC = "negative_advantage_fraction"
STEPS = 10
REMEDY = (
    "so that every sample counts in full, as in REINFORCE without a baseline; give rewards of both signs, or set "
    "algorithm.advantage=group_mean or reward.normalize=group"
)


def never_negative(algorithm: AlgorithmConfig, reward: RewardConfig) -> bool:
    """Whether the settings alone exclude negative advantages under ``coef=signed``: built-in tasks score >= 0."""
    penalised = reward.missing_eos_penalty or reward.overlong_buffer or algorithm.kl == "reward"
    as_scored = reward.kind == "task" and reward.normalize == "none" and not penalised
    return algorithm.coef == "signed" and algorithm.advantage == "raw" and as_scored


class MissingSign:
    """Watches the first ``STEPS`` learner steps of a session."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._name = algorithm.name
        self._left = STEPS if algorithm.coef == "signed" else 0

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Take one step's metrics; returns a sentence, once, if none of the steps had a negative advantage."""
        if not self._left:
            return None
        self._left = 0 if metrics.get(METRIC, 0.0) > 0 else self._left - 1
        if self._left or metrics.get(METRIC, 0.0) > 0:
            return None
        return f"algorithm={self._name} met no negative advantage in {STEPS} learner steps, {REMEDY}."
