"""One job of a sweep, and its line in the sweep's record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.config.run_config import RunConfig


@dataclass(frozen=True)
class Job:
    """One run of a sweep. ``choices``: the settings that differ between the jobs of its grid, without the seed."""

    name: str
    part: str
    timing: str
    choices: dict[str, str]
    seed: int
    overrides: tuple[str, ...]
    config: RunConfig
    hash: str

    @property
    def exclusive(self) -> bool:
        return self.timing == "exclusive"


@dataclass
class JobRecord:
    """One job's line in ``sweep.json``.

    ``state``: pending, running, done, failed or interrupted. ``folder``: of the last attempt, below the sweep's;
    ``seconds``: of the last attempt, start-up included; ``note``: why it did not end well.
    """

    name: str
    hash: str
    part: str
    timing: str
    choices: dict[str, str]
    seed: int
    overrides: list[str]
    state: str = "pending"
    attempts: int = 0
    folder: str = ""
    seconds: float = 0.0
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
