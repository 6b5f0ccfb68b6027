"""Settings of ``asyncrlhf sweep``: ``sweep.*``. A single run ignores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.validation import check, check_choice, check_range, overlay

TIMINGS = ("shared", "exclusive")


@dataclass(frozen=True)
class SweepPart:
    """One grid of a sweep. ``overrides`` are in Hydra's grammar, ``key=a,b`` and ``key=range(0,4)`` being choices.

    ``seeds`` and ``timing`` are ``sweep.seeds`` and ``sweep.timing`` unless the grid has its own.
    """

    overrides: list[str] = field(default_factory=list)
    seeds: int = 1
    timing: str = "shared"

    def __post_init__(self) -> None:
        check_range("seeds", self.seeds, low=1)
        check_choice("timing", self.timing, TIMINGS)


@dataclass(frozen=True)
class SweepConfig:
    """``seeds=N`` trains every configuration with seeds 0 to N-1, unless ``seed`` is swept itself.

    ``timing=shared``: jobs run side by side where cores and GPUs allow, and nothing is said of their speed.
    ``exclusive``: each job has the machine alone, one configuration after the other, seed by seed, so that a change of
    the machine meets all of them alike. ``jobs``: at most so many side by side (0: as many as the machine holds).
    ``parts``: several grids by name, null leaving one out; without any, the command line's choices are the only grid.
    """

    name: str = ""  # empty: the experiment's name, else the run's
    seeds: int = 1
    timing: str = "shared"
    jobs: int = 0
    parts: Any = None  # of SweepPart by name

    def __post_init__(self) -> None:
        check("/" not in self.name, f"sweep.name={self.name!r} must be a folder's name without a slash.")
        check_range("sweep.seeds", self.seeds, low=1)
        check_choice("sweep.timing", self.timing, TIMINGS)
        check_range("sweep.jobs", self.jobs, low=0)
        self.grids  # noqa: B018  raises ConfigError for what cannot be read as parts

    @property
    def grids(self) -> dict[str, SweepPart]:
        """The grids by name, with seeds and timing filled in; one without a name where none are given."""
        if self.parts is None:
            return {"": SweepPart(seeds=self.seeds, timing=self.timing)}
        named = {str(k): entry for k, entry in self.parts.items() if entry} if isinstance(self.parts, Mapping) else {}
        check(
            named and all(isinstance(entry, Mapping) for entry in named.values()),
            f"sweep.parts={self.parts} are no grids by name; allowed: null, or such as "
            "{quality:{overrides:['async.lag=0,4']}}.",
        )
        default = SweepPart(seeds=self.seeds, timing=self.timing)
        return {str(name): overlay(default, entry, f"sweep.parts.{name}") for name, entry in named.items()}
