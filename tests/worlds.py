"""Environments and tools for tests of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from asyncrlhf.episodes.environment import Environment, Step
from asyncrlhf.episodes.replies import ParsedReply


class Sums(Environment):
    """Three sums, one a turn, in plain text: the share of right answers is the reward. ``SECONDS``: of a step."""

    TURNS, SECONDS = 3, 0.0

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._row, self._asked, self._answer = row, 1, str(row["answer"])

    async def step(self, reply: ParsedReply) -> Step:
        await asyncio.sleep(self.SECONDS)
        right = reply.text.strip() == self._answer
        if self._asked == self.TURNS:
            return Step(done=True, reward=right / self.TURNS)
        self._asked += 1
        left, other = (self._row["seed"] // 7**self._asked) % 50, (self._row["seed"] // 11**self._asked) % 50
        self._answer = str(left + other)
        return Step(f"{left}+{other}=", reward=right / self.TURNS, tools=("next",))


class SlowSums(Sums):
    SECONDS = 1.0


class OneSum(Sums):
    """One answer, as without an environment."""

    TURNS = 1
