"""Reward normalisation (``reward.normalize``): computes the rewards to train on when the learner takes a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asyncrlhf.errors import CheckpointError
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.types import RolloutInfo

STATE_FILE = "reward_normalizer.json"
SMALLEST_SPREAD = 1e-8  # rewards that differ by less are the same


@dataclass
class RunningMoments:
    """Mean and squared deviations of everything seen, merged batch by batch (Chan, Golub, LeVeque 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    def add(self, values: np.ndarray) -> None:
        count, mean = len(values), float(values.mean())
        total = self.count + count
        shift = mean - self.mean
        self.squares += float(((values - mean) ** 2).sum()) + shift**2 * self.count * count / total
        self.mean += shift * count / total
        self.count = total

    @property
    def spread(self) -> float:
        """Standard deviation of the population."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RewardNormalizer:
    """(reward - mean) / standard deviation, then clipped to ``normalize_clip`` if it is set.

    ``none``: rewards stay as they are. ``group``: over the siblings of the batch; ``batch``: over the batch;
    ``running``: over every batch so far, this one included, so that the scale does not jump from step to step. A spread
    of zero gives zeros. The statistics depend on the batches and not on the order of arrival, so that a scheduled mode
    is reproducible on any hardware.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._kind = config.normalize
        self._clip = config.normalize_clip or math.inf
        self.moments = RunningMoments()

    def of_batch(self, rollouts: Sequence[RolloutInfo]) -> tuple[Sequence[RolloutInfo], dict[str, float]]:
        """The rollouts with the rewards to train on. If they were normalised, also metrics: mean and standard deviation
        of the scored and of the normalised rewards."""
        if self._kind == "none":
            return rollouts, {}
        rewards = np.array([r.reward for r in rollouts], dtype=np.float64)
        normal = self.normalize(rewards, [r.group_id for r in rollouts])
        figures = {
            "reward_mean": float(rewards.mean()),  # of raw rewards; the learner's own are of normalised ones
            "reward_std": float(rewards.std()),
            "normalized_reward_mean": float(normal.mean()),
            "normalized_reward_std": float(normal.std()),
        }
        return [replace(r, reward=float(value)) for r, value in zip(rollouts, normal, strict=True)], figures

    def normalize(self, rewards: np.ndarray, group_ids: Sequence[int]) -> np.ndarray:
        """Normalise ``rewards`` [N] of one batch; rollout i belongs to ``group_ids[i]``."""
        if self._kind == "running":
            self.moments.add(rewards)
            normal = _scaled(rewards, self.moments.mean, self.moments.spread)
        elif self._kind == "batch":
            normal = _scaled(rewards, rewards.mean(), rewards.std())
        else:
            normal = np.zeros_like(rewards)
            groups = np.asarray(group_ids)
            for group in np.unique(groups):
                own = rewards[groups == group]
                normal[groups == group] = _scaled(own, own.mean(), own.std())
        return np.clip(normal, -self._clip, self._clip)

    def forget(self) -> None:
        """Reset the running statistics."""
        self.moments = RunningMoments()

    def save(self, folder: Path) -> None:
        """Write the statistics beside the learner's part of a checkpoint; writes nothing under ``none``."""
        if self._kind == "none":
            return
        (folder / STATE_FILE).write_text(json.dumps(vars(self.moments)))

    def load(self, folder: Path) -> None:
        """Read the statistics, if the checkpoint has them. Raises CheckpointError for a file that cannot be read."""
        path = folder / STATE_FILE
        if self._kind == "none" or not path.is_file():
            return
        try:
            self.moments = RunningMoments(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"the reward statistics {path} cannot be read: {error}") from error


def _scaled(values: np.ndarray, mean: float, spread: float) -> np.ndarray:
    return (values - mean) / max(float(spread), SMALLEST_SPREAD)
