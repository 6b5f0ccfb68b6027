"""When the environments of a worker were at work, for the run's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST = 2048  # steps that wait to be taken; further ones are counted as lost
LEAST_SECONDS = 0.001  # of a step that is kept: a timeline shows no shorter ones, which may be thousands a second
LONGEST_NAME = 40  # characters: the model may call what it likes


class StepTime(NamedTuple):
    """``name``: of the tools that were called, may be empty; times by the clock of the loop."""

    name: str
    start: float
    end: float


class StepTimes:
    def __init__(self) -> None:
        self._steps: list[StepTime] = []
        self._lost = 0

    def add(self, tools: Sequence[str], start: float, end: float) -> None:
        if end - start < LEAST_SECONDS:
            return
        if len(self._steps) == MOST:
            self._lost += 1
            return
        self._steps.append(StepTime(", ".join(dict.fromkeys(tools))[:LONGEST_NAME], start, end))

    def take(self) -> tuple[list[StepTime], int]:
        """The steps since the last call, and the number of those that were lost."""
        taken = self._steps, self._lost
        self._steps, self._lost = [], 0
        return taken
