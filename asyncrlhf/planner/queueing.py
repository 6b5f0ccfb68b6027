"""Closed forms of an asynchronous run: throughput, idle time and staleness from the rates of its two sides."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Steady:
    """What is expected once a run has settled.

    Args:
        step: seconds a learner step.
        learner_idle: share of its time that the learner waits.
        held_back: share of their time that the generators wait for admission.
        staleness: versions, mean over rollouts; where the bound is met an interval, [low, high].
    """

    step: float
    learner_idle: float
    held_back: float
    staleness: tuple[float, float]


def steady(
    generation: float, training: float, batch: int, in_flight: float, bound: int, longest: float = 1.0
) -> Steady:
    """Of generators that make ``generation`` rollouts a second alone beside a learner that takes ``training``.

    Args:
        batch: rollouts a step.
        in_flight: sequences that all generators hold at once.
        bound: max_staleness.
        longest: the expected longest of a group's responses over the mean (``Workload.longest_of``).

    By Little's law a rollout is in flight for ``in_flight / generation`` seconds; its group waits for the longest.
    """
    ratio = generation / training
    step = batch / min(generation, training)
    if ratio <= 1:
        natural = in_flight * longest / batch + ratio
        return Steady(step, 1 - ratio, 0.0, (min(natural, bound), min(natural, bound)))
    return Steady(step, 0.0, 1 - 1 / ratio, (max(0.0, bound - 0.5), float(bound)))


def least_bound(batch: int, in_flight: float, ratio: float, longest: float = 1.0, tail: float = 0.0) -> int:
    """The smallest max_staleness that costs no rollouts where generators are the slower side (``ratio`` <= 1); below
    it some are dropped. ``tail``: what the 95th percentile of staleness in flight lies over its mean."""
    return math.ceil(in_flight * longest / batch + min(ratio, 1.0) + tail)


def balanced(devices: int, generator_rate: float, learner_rate: float) -> tuple[int, int]:
    """(generator devices, learner devices) at which both sides make as many rollouts a second; rates are a device's."""
    generators = round(devices * learner_rate / (learner_rate + generator_rate))
    generators = min(max(generators, 1), devices - 1)
    return generators, devices - generators
