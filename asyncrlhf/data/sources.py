"""The prompt source, an endless and resumable cursor over prompts by index; streams and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.types import IntArray, Prompt

Item = TypeVar("Item")
MIXED_AT_ONCE = 1024  # draws of a mixture


class PromptSource:
    """An endless stream of prompts by index, whose position can be saved and restored.

    It yields ``length`` prompts, shuffled again in each epoch; with ``length=None``, ``prompt_at`` returns a prompt for
    every index (a generator of prompts by number). The order depends only on ``seed``, so a restored source yields
    exactly the prompts that the first would have yielded.
    """

    def __init__(self, prompt_at: Callable[[int], Prompt], length: int | None, seed: int) -> None:
        if length is not None and length < 1:
            raise ValueError(f"a source needs at least one prompt, got length={length}")
        self._prompt_at = prompt_at
        self._length = length
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: IntArray = np.empty(0, dtype=np.int64)

    def next(self) -> Prompt:
        prompt = self.at(self._position)
        self._position += 1
        return prompt

    def at(self, position: int) -> Prompt:
        """The prompt at ``position`` of the stream, from 0."""
        return self.prompt(self.index(position))

    def prompt(self, index: int) -> Prompt:
        """The prompt of an :meth:`index`."""
        return self._prompt_at(index)

    def heard(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """What the answers of one group to ``prompt`` earned. The order of this stream does not depend on it."""

    def state(self) -> dict[str, Any]:
        """The cursor as plain JSON values."""
        return {"position": self._position, "seed": self._seed, "length": self._length}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position of :meth:`state`; raises CheckpointError for the state of another source."""
        for key, own in (("seed", self._seed), ("length", self._length)):
            if state[key] != own:
                raise CheckpointError(
                    f"The prompt cursor was saved with {key}={state[key]}, but this run has {key}={own}; "
                    "resume with the same seed and prompts, or start afresh."
                )
        self._position = int(state["position"])

    def index(self, position: int) -> int:
        """Which of the prompts lies at ``position``: one of ``length``, or its own number if there is no end."""
        if self._length is None:
            return position
        epoch, offset = divmod(position, self._length)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._length)
            self._epoch = epoch
        return int(self._order[offset])


class PromptStream:
    """Prompts by number from passes over data that is read on demand: ``read(epoch)`` opens a pass.

    Numbers rise; for a number that is not the next, the prompts before it are read, from the start if it is behind.
    """

    def __init__(self, read: Callable[[int], Iterator[Prompt]]) -> None:
        self._read = read
        self._number, self._epoch = 0, 0  # of the next prompt, and of the pass that gives it
        self._prompts: Iterator[Prompt] | None = None

    def __call__(self, number: int) -> Prompt:
        """Raises ConfigError if a whole pass gives no prompt."""
        if self._prompts is None or number < self._number:
            self._number, self._epoch, self._prompts = 0, 0, self._read(0)
        while True:
            prompt = next(self._prompts, None)
            if prompt is None:
                self._epoch += 1
                self._prompts = self._read(self._epoch)
                prompt = next(self._prompts, None)
                if prompt is None:
                    raise ConfigError("The stream of prompts holds none that can be trained on.")
            self._number += 1
            if self._number > number:
                return prompt


def shuffled(items: Iterable[Item], size: int, generator: np.random.Generator) -> Iterator[Item]:
    """``items`` in random order by ``generator``, each at most ``size`` places early."""
    buffer: list[Item] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        index = int(generator.integers(size))
        yield buffer[index]
        buffer[index] = item
    yield from (buffer[int(i)] for i in generator.permutation(len(buffer)))


class Mixture:
    """Prompts by number from several sources, each drawn with the probability of its share, for a
    :class:`PromptSource` without length."""

    def __init__(self, sources: Sequence[PromptSource], shares: Sequence[float], seed: int) -> None:
        self._sources, self._shares, self._seed = sources, shares, seed
        self._before = [np.zeros(len(sources), np.int64)]  # by block: prompts of each source before it
        self._block = -1
        self._draws: IntArray = np.empty(0, dtype=np.int64)

    def __call__(self, number: int) -> Prompt:
        block, place = divmod(number, MIXED_AT_ONCE)
        while len(self._before) <= block:
            counts = np.bincount(self._drawn(len(self._before) - 1), minlength=len(self._sources))
            self._before.append(self._before[-1] + counts)
        draws = self._drawn(block)
        which = int(draws[place])
        return self._sources[which].at(int(self._before[block][which] + (draws[:place] == which).sum()))

    def _drawn(self, block: int) -> IntArray:
        if block != self._block:
            generator = np.random.default_rng([self._seed, len(self._sources), block])
            self._draws = generator.choice(len(self._sources), MIXED_AT_ONCE, p=self._shares)
            self._block = block
        return self._draws
