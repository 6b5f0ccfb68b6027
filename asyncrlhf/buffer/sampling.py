"""Which groups of the buffer a batch takes, and with what probability each was to be taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Chosen = list[tuple[int, float]]  # (index, probability of being taken; 1 where nothing has to be corrected)


def fifo(arrivals: Sequence[int], priorities: Sequence[float], count: int, rng: np.random.Generator) -> Chosen:
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i])
    return [(i, 1.0) for i in order[:count]]


def lifo(arrivals: Sequence[int], priorities: Sequence[float], count: int, rng: np.random.Generator) -> Chosen:
    order = sorted(range(len(arrivals)), key=lambda i: -arrivals[i])
    return [(i, 1.0) for i in order[:count]]


def uniform(arrivals: Sequence[int], priorities: Sequence[float], count: int, rng: np.random.Generator) -> Chosen:
    return [(int(i), 1.0) for i in rng.permutation(len(arrivals))[:count]]


def priority(arrivals: Sequence[int], priorities: Sequence[float], count: int, rng: np.random.Generator) -> Chosen:
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


CHOOSERS: dict[str, Callable[[Sequence[int], Sequence[float], int, np.random.Generator], Chosen]] = {
    "fifo": fifo,
    "lifo": lifo,
    "uniform": uniform,
    "priority": priority,
}
