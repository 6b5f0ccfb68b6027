"""Environments and tools for tests of episodes."""

from __future__ import annotations

import asyncio
import os
import time
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


class SlowStart(OneSum):
    """One answer, after a reset of 0.1 s."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        await asyncio.sleep(0.1)
        await super().reset(row)


class TailSums(Sums):
    """Steps of 0.02 s, one of fifty of 1 s."""

    async def step(self, reply: ParsedReply) -> Step:
        await asyncio.sleep(1.0 if (self._row["seed"] >> self._asked) % 50 == 0 else 0.02)
        return await super().step(reply)


class Strange(Sums):
    """Something is wrong with one of four episodes."""

    @property
    def strange(self) -> bool:
        return bool(self._row["seed"] % 4 == 0)


class Raises(Strange):
    async def step(self, reply: ParsedReply) -> Step:
        if self.strange:
            raise RuntimeError("the world has ended")
        return await super().step(reply)


class Hangs(Strange):
    async def step(self, reply: ParsedReply) -> Step:
        await asyncio.sleep(1e6 if self.strange else 0)
        return await super().step(reply)


class NoText(Strange):
    async def step(self, reply: ParsedReply) -> Step:
        step = await super().step(reply)
        return Step([{"role": "user", "content": b"\xff\x00"}]) if self.strange and not step.done else step


class Floods(Strange):
    async def step(self, reply: ParsedReply) -> Step:
        step = await super().step(reply)
        return Step("9" * 10**8) if self.strange and not step.done else step


class BadReward(Strange):
    async def reward(self) -> float | None:
        return float("nan") if self.strange else await super().reward()


class Rare(Sums):
    """Something is wrong with few episodes; the others take a while."""

    SECONDS, ONE_IN = 0.2, 90  # of the first 128 rollouts of seed 0 one, with the id 37

    @classmethod
    def is_strange(cls, seed: int) -> bool:
        return seed % cls.ONE_IN == 0


class Moody(Sums):
    """Some steps take long, and in one of ten episodes something goes wrong."""

    async def step(self, reply: ParsedReply) -> Step:
        seed = self._row["seed"] >> self._asked
        await asyncio.sleep((0.0, 0.01, 0.05, 0.3)[seed % 4])
        step, fate = await super().step(reply), self._row["seed"] % 40
        if fate == 0:
            raise RuntimeError("the world has ended")
        if fate == 1:
            await asyncio.sleep(1e6)
        if fate == 2 and not step.done:
            return Step("9" * 10**6)
        if fate == 3 and not step.done:
            return Step([{"role": "user", "content": b"\xff\x00"}])
        return step


class Exits(Rare):
    """Its worker's process ends."""

    async def step(self, reply: ParsedReply) -> Step:
        if self.is_strange(self._row["seed"]):
            os._exit(7)
        return await super().step(reply)


class Blocks(Rare):
    """Nothing else goes on in its worker's process."""

    async def step(self, reply: ParsedReply) -> Step:
        if self.is_strange(self._row["seed"]):
            time.sleep(1e6)
        return await super().step(reply)


class Stuck(Strange):
    """A function, which runs in a thread, and in some episodes never ends."""

    def step(self, reply: ParsedReply) -> Any:
        if self.strange:
            time.sleep(1e6)
        return super().step(reply)


class RaisesAtReset(Strange):
    async def reset(self, row: Mapping[str, Any]) -> None:
        await super().reset(row)
        if self.strange:
            raise KeyError("no such level")


SEVERAL = {"sums": Sums, "one": OneSum}
