"""The LearnerBackend protocol: how a learner rank trains its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.learner_config import LearnerConfig
from asyncrlhf.learner.shards import Shards
from asyncrlhf.types import FloatArray, TrainBatch


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """What a backend is built from, beside its models and its place among the ranks.

    Args:
        steps: learner steps of the whole run, for the learning-rate schedule.
        temperature: the generator's sampling temperature; policy log-probs are taken at the same one, so that policy
            and behavior log-probs speak of one distribution; filters of the sampler come with the batch, as the sets
            of tokens that they kept. 0, greedy, counts as 1.
        max_completion_length: in tokens, the constant of ``algorithm.aggregate=const``.
        reference_served: batches come with the reference's log-probs, so that no such model is needed.
        critic_served: batches come with the critic's values, so that the backend makes no pass of its own for them.
    """

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    steps: int
    temperature: float = 1.0
    max_completion_length: int | None = None
    reference_served: bool = False
    critic_served: bool = False


@dataclass(frozen=True)
class StepResult:
    """What one learner step did. ``skipped``: the gradient was not finite and the weights did not move."""

    metrics: dict[str, float]
    skipped: bool = False
    seconds: float = 0.0


class LearnerBackend(Protocol):
    """One rank of the learner group. Every method is called on all ranks together, ``score`` only with ``shards``."""

    @property
    def policy_version(self) -> int:
        """Completed learner steps."""
        ...

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One learner step on this rank's share of the batch: raises ``policy_version`` by one, also when skipped."""
        ...

    @property
    def shards(self) -> Shards | None:
        """How to read the policy's tensors where no rank holds them whole; None where each does."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The policy's tensors by name, for publishing (tied tensors once, under their first name).

        With ``shards``: copies of all of them in rank 0's host memory, empty elsewhere.
        """
        ...

    def critic_parameters(self) -> Mapping[str, torch.Tensor]:
        """What training changes of the critic, by name, for a critic service; empty without a critic. Whole only where
        the learner is not sharded."""
        ...

    def before_update(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called each time before the parameters change: a snapshot may still be read from them."""
        ...

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        """Log-probs of each token given those before it; [len-1] for each text."""
        ...

    def save(self, folder: Path) -> None:
        """Model (``from_pretrained`` format), optimizer, scheduler, RNG, version; rank 0 writes the shared parts."""
        ...

    def load(self, folder: Path) -> None: ...
