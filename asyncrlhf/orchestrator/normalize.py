"""Normalised rewards: what the learner trains on where ``reward.normalize`` says so, at the moment it takes a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from asyncrlhf.actors.messages import TrainItem
from asyncrlhf.cluster.handles import LearnerHandle, Runtime
from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.backend import StepResult
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.types import Payload

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
    """(reward - mean) / standard deviation, then clipped to ``normalize_clip`` where it is on.

    ``group``: over the siblings of the batch; ``batch``: over the batch; ``running``: over every batch so far, this one
    included, so that the scale does not jump from step to step. A spread of zero gives zeros. The statistics are those
    of batches and not of arrivals, so that a scheduled mode repeats itself whatever the hardware does.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._kind = config.normalize
        self._clip = config.normalize_clip or math.inf
        self.moments = RunningMoments()

    def normalize(self, rewards: np.ndarray, group_ids: Sequence[int]) -> np.ndarray:
        """``rewards`` [N] of one batch, whose rollout i belongs to ``group_ids[i]``."""
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

    def save(self, folder: Path) -> None:
        (folder / STATE_FILE).write_text(json.dumps(vars(self.moments)))

    def load(self, folder: Path) -> None:
        """A checkpoint of a run that did not normalise leaves the statistics at their beginning."""
        path = folder / STATE_FILE
        if not path.is_file():
            return
        try:
            self.moments = RunningMoments(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"the reward statistics {path} cannot be read: {error}") from error


def _scaled(values: np.ndarray, mean: float, spread: float) -> np.ndarray:
    return (values - mean) / max(float(spread), SMALLEST_SPREAD)


class NormalizingLearner:
    """A learner handle whose batches arrive with normalised rewards, and whose checkpoints hold the statistics."""

    def __init__(self, inner: LearnerHandle, runtime: Runtime, normalizer: RewardNormalizer) -> None:
        self._inner = inner
        self._runtime = runtime
        self._normalizer = normalizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def train(self, items: Sequence[TrainItem]) -> StepResult:
        rewards = np.array([item.reward for item in items], dtype=np.float64)
        groups = await self._group_ids([item.payload for item in items])
        normal = self._normalizer.normalize(rewards, groups)
        result = await self._inner.train(
            [replace(item, reward=float(value)) for item, value in zip(items, normal, strict=True)]
        )
        figures = {"normalized_reward_mean": float(normal.mean()), "normalized_reward_std": float(normal.std())}
        return replace(result, metrics={**result.metrics, **figures})

    async def _group_ids(self, payloads: Sequence[Payload]) -> list[int]:
        return [rollout.group_id for rollout in await self._runtime.fetch(payloads)]

    async def save(self, folder: Path) -> None:
        await self._inner.save(folder)
        self._normalizer.save(folder)

    async def load(self, folder: Path) -> None:
        await self._inner.load(folder)
        self._normalizer.load(folder)


class NormalizingRuntime:
    """A runtime whose learner is a :class:`NormalizingLearner`; everything else is the inner runtime's."""

    def __init__(self, inner: Runtime, normalizer: RewardNormalizer) -> None:
        self._inner = inner
        self._normalizer = normalizer
        self._learner: NormalizingLearner | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def learner(self) -> NormalizingLearner:
        if self._learner is None:
            self._learner = NormalizingLearner(self._inner.learner, self._inner, self._normalizer)
        return self._learner


def normalized(runtime: Runtime, config: RewardConfig) -> Runtime:
    """``runtime`` itself where rewards are not normalised."""
    if config.normalize == "none":
        return runtime
    return cast(Runtime, NormalizingRuntime(runtime, RewardNormalizer(config)))
