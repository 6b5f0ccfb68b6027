"""The environments of the study: products asked one after the other, and tools that only take time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrlhf import Environment, Step
from asyncrlhf.episodes.tools import calculator, schema_of


class One(Environment):
    """``QUESTIONS`` products of two numbers below 100, one a turn. A turn is right if it says the product, or calls the
    calculator with an expression of its value; the reward is the share of right turns. A turn that reaches the
    episode's limit is cut off before the environment sees it, and is wrong."""

    QUESTIONS = 1

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [schema_of(calculator)]

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._pairs = np.random.default_rng(row["seed"]).integers(0, 100, (self.QUESTIONS, 2)).tolist()
        self._turn, self._right = 0, 0
        return self._question()

    def _question(self) -> str:
        left, right = self._pairs[self._turn]
        return f"{left}*{right}="

    async def step(self, reply: Any) -> Step:
        left, right = self._pairs[self._turn]
        said, told = reply.text.strip(), []
        for call in reply.tool_calls[:1]:
            said = answer_of(call.arguments)
            told.append({"role": "tool", "name": call.name, "content": said})
        self._right += said == str(left * right)
        self._turn += 1
        if self._turn == self.QUESTIONS:
            return Step(done=True)
        return Step([*told, {"role": "user", "content": self._question()}])

    async def reward(self) -> float:
        return self._right / self.QUESTIONS


def answer_of(arguments: Mapping[str, Any]) -> str:
    """What the calculator says; one word for all that it refuses."""
    try:
        return calculator(**arguments)[:12]
    except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return "error"


class Two(One):
    QUESTIONS = 2


class Four(One):
    QUESTIONS = 4


class Eight(One):
    QUESTIONS = 8


class Tool0(Environment):
    """Four turns, each followed by ``SECONDS`` of a tool."""

    TURNS, SECONDS = 4, 0.0

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._turn = 0
        return "1+1="

    async def step(self, reply: Any) -> Step:
        if self.SECONDS:
            await asyncio.sleep(self.SECONDS)
        self._turn += 1
        return Step("1+1=", done=self._turn == self.TURNS, reward=0.25)


class Tool01(Tool0):
    SECONDS = 0.1


class Tool1(Tool0):
    SECONDS = 1.0


class Tool5(Tool0):
    SECONDS = 5.0


LEARNER_SECONDS = 0.5


def slow_loss(inputs: Any) -> torch.Tensor:
    """A learner's step of known length that leaves the processor to the others."""
    time.sleep(LEARNER_SECONDS)
    return -inputs.advantages * inputs.policy_logprobs
