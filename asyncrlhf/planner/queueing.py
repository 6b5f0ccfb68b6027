"""Closed forms of an asynchronous run: throughput, idle time and staleness from the rates of its two sides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Steady:
    """Expected figures of a run in its steady state.

    Args:
        step: seconds per learner step.
        learner_idle: share of time that the learner waits.
        held_back: share of time that the generators wait for admission.
        staleness: mean over rollouts in versions, as an interval [low, high].
    """

    step: float
    learner_idle: float
    held_back: float
    staleness: tuple[float, float]


def steady(
    generation: float, training: float, batch: int, in_flight: float, bound: int, longest: float = 1.0
) -> Steady:
    """Steady state of generators and a learner that alone handle ``generation`` and ``training`` rollouts/s.

    Args:
        batch: rollouts per step.
        in_flight: sequences that all generators hold at once.
        bound: max_staleness.
        longest: expected longest response of a group divided by the mean (``Workload.longest_of``).

    By Little's law a rollout is in flight for ``in_flight / generation`` seconds; its group waits for the longest.
    """
    ratio = generation / training
    step = batch / min(generation, training)
    if ratio <= 1:
        natural = in_flight * longest / batch + ratio
        return Steady(step, 1 - ratio, 0.0, (min(natural, bound), min(natural, bound)))
    return Steady(step, 0.0, 1 - 1 / ratio, (max(0.0, bound - 0.5), float(bound)))
