"""A small game for tiny models, and an example of an environment: find a hidden digit in four guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.episodes.environment import Environment, Step
from asyncrlhf.episodes.replies import ParsedReply


class HigherLower(Environment):
    """The model reads the range in which the digit lies, such as ``0-9=``, and answers a digit; a wrong one narrows the
    range, so that who always says the middle needs four guesses at most. The right guess earns 1 and ends the game; one
    outside of the range, or no digit, costs 0.2. So only a game that was won has a reward above 0.
    """

    GUESSES = 4

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._hidden = (int(row["seed"]) * 7 + 3) % 10  # the same for the siblings of a group
        self._low, self._high, self._left = 0, 9, self.GUESSES
        return self._range()

    async def step(self, reply: ParsedReply) -> Step:
        said = reply.text.strip()
        guess = int(said) if said in list("0123456789") else -1
        self._left -= 1
        right, inside = guess == self._hidden, self._low <= guess <= self._high
        if self._low <= guess < self._hidden:
            self._low = guess + 1
        elif self._hidden < guess <= self._high:
            self._high = guess - 1
        return Step(self._range(), done=right or self._left == 0, reward=1.0 if right else 0.0 if inside else -0.2)

    def _range(self) -> str:
        return f"{self._low}-{self._high}="
