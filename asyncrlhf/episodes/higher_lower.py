"""A small game for tiny models, and an example of an environment: find a hidden digit in four guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.episodes.environment import Environment, Step
from asyncrlhf.episodes.replies import ParsedReply


class HigherLower(Environment):
    """The model reads the range in which the digit lies, such as ``0-9=``, and guesses; a wrong guess narrows it.

    Who always says the middle needs four guesses at most. A guess earns the share of all digits that it rules out, and
    the right one what is left. So an episode's reward is 1 if the digit was found; a guess outside of the range, or no
    digit, earns nothing.
    """

    GUESSES = 4

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._hidden = (int(row["seed"]) * 7 + 3) % 10  # the same for the siblings of a group
        self._low, self._high, self._left = 0, 9, self.GUESSES
        return self._range()

    async def step(self, reply: ParsedReply) -> Step:
        said, before = reply.text.strip(), self._high - self._low + 1
        guess = int(said) if said in list("0123456789") else -1
        self._left -= 1
        if guess == self._hidden:
            return Step(done=True, reward=before / 10)
        if self._low <= guess < self._hidden:
            self._low = guess + 1
        elif self._hidden < guess <= self._high:
            self._high = guess - 1
        ruled_out = before - (self._high - self._low + 1)
        return Step(self._range(), done=self._left == 0, reward=ruled_out / 10)

    def _range(self) -> str:
        return f"{self._low}-{self._high}="
