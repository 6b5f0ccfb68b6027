"""Environments of simulated runs: several turns that take their time, and all that an environment may do wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrlhf.episodes.driver import Driver
from asyncrlhf.episodes.environment import Caller, Environment, Step
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.episodes.replies import ParsedReply
from asyncrlhf.episodes.worker import EpisodeWorker

LONGEST_TURNS = 4
CONTEXT = 10**6  # tokens that fit into the imitated model
TOKEN_CHARACTERS = 16  # of an observation
ODDITIES = ("raises", "raises at reset", "hangs", "floods", "no text", "nan", "close hangs")
ENDED, NO_LEVEL = "the world has ended", "no such level"
DEADLY = ("exits", "blocks")  # what ends the worker, or leaves it without a sign of life


@dataclass
class Scene:
    """What goes wrong: in one of ``odd_one_in`` episodes something, in one of ``deadly_one_in`` something that its
    worker does not survive (0: in none). ``strike`` does that to the worker."""

    config: EpisodeConfig
    odd_one_in: int
    deadly_one_in: int
    strike: Callable[[str], None]

    def worker(self, name: str) -> EpisodeWorker:
        driver: Any = Driver
        return EpisodeWorker(name, driver(self.config, self, Talk(), None, CONTEXT))

    @property
    def call(self) -> Caller:
        return Caller(self.config.timeout_seconds, inline=True)

    def environment(self, row: Mapping[str, Any]) -> Environment:
        return Play(self)

    def row(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return dict(columns)

    def close(self) -> None:
        """Holds nothing."""


class Play(Environment):
    """An episode's own seed decides how long it takes, how many turns it has, and what goes wrong at which."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def reset(self, row: Mapping[str, Any]) -> None:
        self._rng = rng = random.Random(row["seed"])
        self._left, self._odd, self._odd_at = rng.randint(1, LONGEST_TURNS), "", rng.randrange(LONGEST_TURNS)
        for one_in, kinds in ((self._scene.odd_one_in, ODDITIES), (self._scene.deadly_one_in, DEADLY)):
            if rng.randrange(one_in or 1) == 0 and one_in:
                self._odd = rng.choice(kinds)
        self._odd_at %= self._left
        await self._takes_time()
        if self._odd == "raises at reset":
            raise KeyError(NO_LEVEL)

    async def _takes_time(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.2, 0.2, 1.0)))

    async def step(self, reply: Any) -> Step:
        await self._takes_time()
        self._left -= 1
        self._odd_at -= 1
        told = "seen"
        if self._odd_at < 0 and self._odd:
            odd = self._odd
            if odd == "raises":
                raise RuntimeError(ENDED)
            if odd in DEADLY:
                self._scene.strike(odd)
            if odd in ("hangs", *DEADLY):
                await asyncio.sleep(1e6)
            if odd == "no text":
                return Step([{"role": "user", "content": b"\xff"}] if self._left else None, self._left == 0)  # type: ignore[arg-type]
            told = "9" * 10**5 if odd == "floods" else told
        return Step(told, done=self._left == 0)

    async def reward(self) -> float | None:
        return float("nan") if self._odd == "nan" else 0.5

    async def close(self) -> None:
        if self._odd == "close hangs":
            await asyncio.sleep(1e6)


class Talk:
    """Tokens of a conversation without a tokenizer."""

    note = ""

    def parse(self, ids: Any, tools: Any) -> Any:
        return ParsedReply("")

    def suffix(self, ids: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
        return np.zeros(1 + sum(len(message["content"]) for message in messages) // TOKEN_CHARACTERS, np.int64)
