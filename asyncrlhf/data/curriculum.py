"""Prompts worth sampling: those whose answers earned unequal rewards come again sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from asyncrlhf.data.sources import PromptSource
from asyncrlhf.types import Prompt

CURRICULA = ("off", "difficulty", "regret")
FRESH = 0.5  # share of the draws that take the next prompt of the stream, whatever is known
POOL = 1024  # prompts remembered
KEPT = 0.5  # of what was known of a prompt, when it is heard of again: the policy has moved
STREAM = 7  # sets the draws' random numbers apart from those of the stream's order


@dataclass
class Known:
    """What a prompt's answers earned: ``count`` of them, ``right`` of which were, by the least reward of a right one;
    sums fall by KEPT with each visit. ``asked``: answers are under way."""

    index: int
    right: float = 0.0
    count: float = 0.0
    total: float = 0.0
    best: float = 0.0
    asked: bool = True

    def hear(self, rewards: Sequence[float], right: float) -> None:
        self.right = KEPT * self.right + sum(reward >= right for reward in rewards)
        self.count = KEPT * self.count + len(rewards)
        self.total = KEPT * self.total + sum(rewards)
        self.best = max([*rewards, self.best] if self.count > len(rewards) else rewards)
        self.asked = False

    def worth(self, kind: str) -> float:
        if self.asked:
            return 0.0
        if kind == "regret":
            return max(0.0, self.best - self.total / self.count)  # a mean of equal rewards may round above them
        rate = (self.right + 0.5) / (self.count + 1)
        return rate * (1 - rate)


class Curriculum(PromptSource):
    """The prompts of ``source``: some come as it has them, the others again from a pool of those
    heard of, each with a probability in proportion to its worth.

    ``difficulty``: p (1 - p) of the rate p at which answers earn ``right`` or more, with half a right and half a wrong
    one added to those seen: the variance of an answer, and so the size of a group's advantages (learnability,
    2408.15099). ``regret``: the prompt's best reward so far minus its mean (MaxMC, 2110.02439); what was never solved
    has none.

    What a draw knows is what has ended by then, so that two asynchronous runs do not have the same prompts; the order
    in which it ended does not matter. All that is known is in :meth:`state`.
    """

    def __init__(self, source: PromptSource, kind: str, right: float) -> None:
        of = source.state()
        super().__init__(source.prompt, of["length"], of["seed"])
        self._kind, self._right = kind, right
        self._draws = 0
        self._pool: dict[str, Known] = {}  # by prompt id, the last drawn at the end

    def next(self) -> Prompt:
        rng = np.random.default_rng([self._seed, STREAM, self._draws])
        self._draws += 1
        worths = np.array([known.worth(self._kind) for known in self._pool.values()])
        if rng.random() < FRESH or not worths.sum():
            index = self.index(self._position)
            prompt = super().next()
        else:
            index = [*self._pool.values()][int(rng.choice(len(worths), p=worths / worths.sum()))].index
            prompt = self.prompt(index)
        known = self._pool.pop(prompt.prompt_id, Known(index))
        known.asked = True
        self._pool[prompt.prompt_id] = known
        if len(self._pool) > POOL:
            del self._pool[next(iter(self._pool))]
        return prompt

    def heard(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        known = self._pool.get(prompt.prompt_id)
        if known is not None and rewards:
            known.hear(rewards, self._right)

    def state(self) -> dict[str, Any]:
        pool = {prompt_id: asdict(known) for prompt_id, known in self._pool.items()}
        return {**super().state(), "draws": self._draws, "pool": pool}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._draws = int(state.get("draws", 0))
        self._pool = {prompt_id: Known(**known) for prompt_id, known in state.get("pool", {}).items()}
