"""Closed forms of an asynchronous run: throughput, idle time and staleness from the rates of its two sides."""

from __future__ import annotations

import math
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


def least_bound(batch: int, in_flight: float, ratio: float, longest: float = 1.0, tail: float = 0.0) -> int:
    """The smallest max_staleness that drops no rollouts if the generators are the slower side (``ratio`` <= 1).
    ``tail``: 95th percentile of staleness in flight minus its mean."""
    return math.ceil(in_flight * longest / batch + min(ratio, 1.0) + tail)


def balanced(devices: int, generator_rate: float, learner_rate: float) -> tuple[int, int]:
    """(generator devices, learner devices) for equal rollouts/s of both sides; the rates are per device."""
    generators = min(max(round(devices * learner_rate / (learner_rate + generator_rate)), 1), devices - 1)
    return generators, devices - generators
