"""One job of a sweep, and its line in the sweep's record."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.records.write.recorder import SUMMARY_FILE


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


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
