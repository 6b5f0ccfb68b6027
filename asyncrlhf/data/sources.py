"""The prompt source: an endless, resumable cursor over prompts that are given by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrlhf.errors import CheckpointError
from asyncrlhf.types import IntArray, Prompt


class PromptSource:
    """An endless stream of prompts by index, whose place can be saved and taken up again.

    It gives ``length`` prompts, shuffled anew in each epoch; ``length=None`` means that ``prompt_at`` answers for every
    index (a generator of prompts by number). The order depends on ``seed`` alone, so a restored source gives exactly
    the prompts that the first would have given.
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
        prompt = self._prompt_at(self._index(self._position))
        self._position += 1
        return prompt

    def state(self) -> dict[str, Any]:
        """The cursor as plain JSON values."""
        return {"position": self._position, "seed": self._seed, "length": self._length}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state` was taken; raises CheckpointError for the state of another source."""
        for key, own in (("seed", self._seed), ("length", self._length)):
            if state[key] != own:
                raise CheckpointError(
                    f"The prompt cursor was saved with {key}={state[key]}, but this run has {key}={own}; "
                    "resume with the same seed and prompts, or start afresh."
                )
        self._position = int(state["position"])

    def _index(self, position: int) -> int:
        if self._length is None:
            return position
        epoch, offset = divmod(position, self._length)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._length)
            self._epoch = epoch
        return int(self._order[offset])
