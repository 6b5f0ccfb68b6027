"""What a learner rank is built from, and what a learner step gives."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.learner_config import LearnerConfig


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
