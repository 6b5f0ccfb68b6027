"""Walks find what enumeration finds, on 50 random spaces small enough to enumerate."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from asyncrlhf.planner.search import annealing, exhaustive, metropolis, prior_then_grid

State = tuple[int, ...]


class Space:
    """Four decisions, costs with interactions and forbidden corners; as layouts have."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.axes = [list(range(rng.randint(3, 6))) for _ in range(4)]
        self._weights = [[rng.uniform(0.5, 2.0) for _ in axis] for axis in self.axes]
        self._pairs = {(i, j): rng.uniform(0, 0.4) for i, j in itertools.combinations(range(4), 2)}
        self._forbidden = rng.uniform(0.0, 0.15)
        self._seed = seed

    def states(self) -> list[State]:
        return list(itertools.product(*self.axes))

    def start(self) -> State:
        return min(self.states()[:: max(1, len(self.states()) // 5)], key=self.cost)

    def neighbour(self, state: State, rng: random.Random) -> State:
        axis = rng.randrange(len(self.axes))
        other = rng.choice([v for v in self.axes[axis] if v != state[axis]])
        return (*state[:axis], other, *state[axis + 1 :])

    def cost(self, state: State) -> float:
        if random.Random(f"{self._seed}{state}").random() < self._forbidden:
            return math.inf
        own = sum(weights[value] for weights, value in zip(self._weights, state, strict=True))
        return own + sum(w * abs(state[i] - state[j]) for (i, j), w in self._pairs.items())


@pytest.mark.parametrize("seed", range(50))
def test_walks_reach_the_optimum_within_two_percent(seed: int) -> None:
    space = Space(seed)
    best = exhaustive(space.states(), space.cost)
    for found in (metropolis(space, 150, seed), annealing(space, 600, seed)):
        assert found.cost <= 1.02 * best.cost
    assert metropolis(space, 150, seed) == metropolis(space, 150, seed)


def test_a_grid_moves_from_its_prior_to_the_optimum_of_a_bowl() -> None:
    axes = [list(range(10)), [1, 2, 4, 8, 16]]
    found = prior_then_grid(axes, (0, 1), lambda s: (s[0] - 7) ** 2 + (s[1] - 8) ** 2)
    assert found.state == (7, 8) and found.asked < 50


def test_a_walk_ends_when_its_time_is_over_and_not_only_after_a_move() -> None:
    class Hopeless(Space):
        def cost(self, state: State) -> float:
            return 1.0 if state == self.start_state else math.inf

        start_state: State = (0, 0, 0, 0)

        def start(self) -> State:
            return self.start_state

    assert metropolis(Hopeless(0), 10**9, 0, seconds=0.05).cost == 1.0
