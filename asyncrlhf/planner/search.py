"""Searches over layouts with one small protocol: exhaustive, prior then grid, Metropolis walks, annealing."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Problem(Protocol[T]):
    """The interface between a walk and a search space."""

    def start(self) -> T:
        """A good first guess."""
        ...

    def neighbour(self, state: T, rng: random.Random) -> T:
        """Another state, one decision away."""
        ...

    def cost(self, state: T) -> float:
        """The objective, to be minimised; infinite if the state cannot run."""
        ...


class Found(NamedTuple, Generic[T]):
    """The best state seen, its cost, and the number of costs computed."""

    state: T
    cost: float
    asked: int


class Counted(Generic[T]):
    """Costs by state, each computed once, and the best state so far."""

    def __init__(self, cost: Callable[[T], float], seconds: float) -> None:
        self._cost, self._known = cost, dict[T, float]()
        self._until = time.monotonic() + seconds
        self.best: tuple[float, T] | None = None

    @property
    def spent(self) -> bool:
        return time.monotonic() > self._until

    def __call__(self, state: T) -> float:
        if state not in self._known:
            cost = self._known[state] = self._cost(state)
            if self.best is None or cost < self.best[0]:
                self.best = (cost, state)
        return self._known[state]

    def found(self) -> Found[T]:
        assert self.best is not None
        return Found(self.best[1], self.best[0], len(self._known))


def exhaustive(states: Sequence[T], cost: Callable[[T], float], seconds: float = math.inf) -> Found[T]:
    """Evaluates every state in order until the time is up."""
    counted = Counted(cost, seconds)
    for state in states:
        counted(state)
        if counted.spent:
            break
    return counted.found()


def prior_then_grid(
    axes: Sequence[Sequence[int]],
    prior: Sequence[int],
    cost: Callable[[tuple[int, ...]], float],
    seconds: float = math.inf,
) -> Found[tuple[int, ...]]:
    """APP's search: evaluates the grid of one step around a centre on each axis and moves the centre to the best point
    until it stays there.

    Args:
        axes: the allowed values of each decision, ascending.
        prior: the first centre (devices split by cost shares), rounded to the nearest allowed values.
    """
    counted = Counted(cost, seconds)
    centre = [min(range(len(axis)), key=lambda i: abs(axis[i] - want)) for axis, want in zip(axes, prior, strict=True)]
    while True:
        around = [range(max(0, i - 1), min(len(axis), i + 2)) for i, axis in zip(centre, axes, strict=True)]
        before = list(centre)
        for chosen in itertools.product(*around):
            counted(tuple(axis[i] for axis, i in zip(axes, chosen, strict=True)))
            if counted.spent:
                return counted.found()
        best = counted.found().state
        centre = [axis.index(value) for axis, value in zip(axes, best, strict=True)]
        if centre == before:
            return counted.found()


def metropolis(
    problem: Problem[T], steps: int, seed: int, betas: Sequence[float] = (1, 4, 16, 64), seconds: float = math.inf
) -> Found[T]:
    """ReaL's walk (2406.14088): accepts a neighbour that is worse by d, relative to the best cost seen, with
    probability exp(-beta d). It walks ``steps`` steps for each of ``betas``, each time from the best state."""
    rng, counted = random.Random(seed), Counted(problem.cost, seconds)
    counted(problem.start())
    for beta in betas:
        state = counted.found().state
        for _ in range(steps):
            other = problem.neighbour(state, rng)
            if _taken(counted(other) - counted(state), beta, counted.found().cost, rng):
                state = other
            if counted.spent:
                return counted.found()
    return counted.found()


def annealing(
    problem: Problem[T], steps: int, seed: int, hot: float = 1.0, cold: float = 0.005, seconds: float = math.inf
) -> Found[T]:
    """One walk whose temperature falls geometrically from ``hot`` to ``cold``, both relative to the best cost."""
    rng, counted = random.Random(seed), Counted(problem.cost, seconds)
    state = problem.start()
    counted(state)
    for step in range(steps):
        temperature = hot * (cold / hot) ** (step / max(1, steps - 1))
        other = problem.neighbour(state, rng)
        if _taken(counted(other) - counted(state), 1 / temperature, counted.found().cost, rng):
            state = other
        if counted.spent:
            break
    return counted.found()


def _taken(change: float, beta: float, scale: float, rng: random.Random) -> bool:
    """Whether a walk accepts a state that costs ``change`` more. From a state that cannot run it accepts any."""
    if change <= 0 or math.isnan(change):
        return True
    return math.isfinite(change) and rng.random() < math.exp(-beta * change / scale)
