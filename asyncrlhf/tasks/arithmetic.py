"""The built-in task: sums such as ``17+25=``, answered by digits, scored by exact match."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import transformers

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.tasks.task import PromptEncoder
from asyncrlhf.types import Prompt

# One of HELDOUT_SHARE pairs of operands belongs to evaluation, by a hash independent of the seed.
HELDOUT_SHARE = 8
HELDOUT_SEED = 20240607


@dataclass(frozen=True)
class Problem:
    """``left operation right``; the operands lie in [0, 10**digits)."""

    left: int
    operation: str
    right: int

    @property
    def text(self) -> str:
        return f"{self.left}{self.operation}{self.right}="

    @property
    def answer(self) -> str:
        results = {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}
        return str(results[self.operation])

    @property
    def is_heldout(self) -> bool:
        """Whether the pair is held out. The order of the operands does not matter, so that 25+17 in training does not
        reveal 17+25; the operation does not matter either."""
        low, high = sorted((self.left, self.right))
        return zlib.crc32(f"{low},{high}".encode()) % HELDOUT_SHARE == 0


class ArithmeticTask:
    """Sums of numbers of up to ``task.digits`` digits under ``task.operations``.

    Training draws from seven eighths of all pairs of operands, evaluation from the other eighth. With few
    digits ``heldout`` returns all held-out pairs, which may be fewer than ``task.heldout_size``.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, config: TaskConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self._config = config
        self._encode = PromptEncoder(tokenizer, config)
        largest = 10**config.digits - 1
        for operation in config.operations:
            self._prompt(Problem(largest, operation, largest))

    def train_source(self, seed: int) -> PromptSource:
        def prompt_at(index: int) -> Prompt:
            return self._prompt(self._draw(np.random.default_rng([seed, index]), heldout=False))

        return PromptSource(prompt_at, length=None, seed=seed)

    def heldout(self) -> list[Prompt]:
        if self._config.digits == 1:
            problems = [Problem(a, op, b) for a in range(10) for b in range(10) for op in self._config.operations]
            return [self._prompt(p) for p in problems if p.is_heldout][: self._config.heldout_size]
        rng = np.random.default_rng([HELDOUT_SEED])
        drawn: dict[Problem, None] = {}
        # Two digits hold more than a thousand held-out pairs; the bound only ends the search of a large heldout_size.
        for _ in range(20 * self._config.heldout_size):
            drawn[self._draw(rng, heldout=True)] = None
            if len(drawn) == self._config.heldout_size:
                break
        return [self._prompt(problem) for problem in drawn]

    def reward(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip() == prompt.answer)

    def _draw(self, rng: np.random.Generator, heldout: bool) -> Problem:
        while True:
            left, right = (int(n) for n in rng.integers(0, 10**self._config.digits, size=2))
            operation = self._config.operations[int(rng.integers(len(self._config.operations)))]
            problem = Problem(left, operation, right)
            if problem.is_heldout == heldout:
                return problem

    def _prompt(self, problem: Problem) -> Prompt:
        return self._encode(f"arithmetic:{problem.text}", problem.text, problem.answer)
