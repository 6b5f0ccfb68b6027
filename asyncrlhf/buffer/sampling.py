"""Sampling: which groups a batch takes, with what probability, and which stragglers it waits for (over_stale=wait)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.types import RolloutGroup

PRIORITY_EPS = 1e-3  # so that a group without spread keeps a small chance of being drawn
Chosen = list[tuple[int, float]]  # (index, probability of being taken; 1 where nothing has to be corrected)


def priority(priorities: Sequence[float], count: int, rng: np.random.Generator) -> Chosen:
    """Draw without replacement, in proportion to ``priorities``, as a race of exponential clocks.

    The first ``count`` clocks win. Given the time t at which the next one would have rung, item i was inside with
    probability ``1 - exp(-p_i t)``, and 1 over that is an unbiased weight (rank conditioning, Cohen and Kaplan 2007;
    Kool et al. 1903.06059). It tends to the usual (N p)^-1 of prioritised replay when few of many are drawn, and to 1
    when all are, where (N p)^-1 would still distort.
    """
    rates = np.asarray(priorities, dtype=np.float64)
    rings: NDArray[np.float64] = rng.exponential(size=len(rates)) / rates
    order = np.argsort(rings, kind="stable")
    threshold = rings[order[count]] if count < len(rates) else np.inf
    return [(int(i), float(-np.expm1(-rates[i] * threshold))) for i in order[:count]]


def spread(group: RolloutGroup) -> float:
    rewards = [r.reward for r in group.rollouts]
    return max(rewards) - min(rewards)


def reward_spread(group: RolloutGroup, version: int) -> float:
    """(sd of the rewards + eps)^0.5; after 2606.04560, with the spread instead of |A|."""
    return math.sqrt(float(np.std([r.reward for r in group.rollouts])) + PRIORITY_EPS)


def advantage(group: RolloutGroup, version: int) -> float:
    """(mean |A| + eps)^0.5 with GRPO's A = (R - mean R) / (sd R + eps), which no scale of the rewards changes: the
    priority of 2606.04560, on whole groups."""
    rewards = np.array([r.reward for r in group.rollouts], dtype=np.float64)
    deviation = np.abs(rewards - rewards.mean()).mean()
    return math.sqrt(float(deviation / (rewards.std() + PRIORITY_EPS)) + PRIORITY_EPS)


def age(group: RolloutGroup, version: int) -> float:
    """1 / (1 + staleness): fresher groups first."""
    return 1.0 / (1.0 + max(0, group.staleness(version)))


MEASURES: tuple[Callable[[RolloutGroup, int], float], ...] = (reward_spread, advantage, age)
PRIORITY = {measure.__name__: measure for measure in MEASURES}


def correction(probabilities: Sequence[float], exponent: float) -> list[float]:
    """Weights (p_min / p)^exponent: 1/p with the largest scaled to 1, so that they only ever shrink a gradient
    (prioritised replay, 1511.05952)."""
    least = min(probabilities, default=1.0)
    return [(least / p) ** exponent for p in probabilities]


def must_wait(version: int, in_flight: Iterable[int], bound: int, groups_per_step: int) -> bool:
    """Whether the step at ``version`` must wait: for some k, more than ``k`` steps' worth of unfinished groups have
    only ``k`` steps left after this one. (k = 0 alone is not enough: when fresher groups overtake, several batches of
    stragglers would reach the bound at one step.)

    ``in_flight``: for each unfinished group the lowest version that its replicas held when it was admitted or begun; or
    a Counter of these.
    """
    pending = 0
    for begun, groups in sorted(Counter(in_flight).items()):
        pending += groups
        if begun <= version and pending > max(0, begun - (version - bound)) * groups_per_step:
            return True
    return False


def groups_due(version: int, begun: Mapping[int, int], bound: int, groups_per_step: int) -> int:
    """How many of the groups begun must train now so that every later step can meet the bound. ``begun``: groups by
    version.

    The look-ahead over the whole bound, to all groups, needs no choice: any full batch meets it.
    """
    due = 0
    for steps_left in range(max(1, bound)):
        limit = version - bound + steps_left
        due = max(due, sum(n for v, n in begun.items() if v <= limit) - steps_left * groups_per_step)
    return due


def beyond(version: int, begun: Mapping[int, int], bound: int, groups_per_step: int) -> set[int]:
    """Ids of the groups that would pass ``bound`` even if groups train in the order in which they began; ``begun``: by
    id, the version that each began with."""
    gone: set[int] = set()
    kept = 0
    for group_id, first in sorted(begun.items(), key=lambda item: (item[1], item[0])):
        if version + kept // groups_per_step - first > bound:
            gone.add(group_id)
        else:
            kept += 1
    return gone
