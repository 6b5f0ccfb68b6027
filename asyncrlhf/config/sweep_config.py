"""Settings of ``asyncrlhf sweep``: ``sweep.*``. A single run ignores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrlhf.validation import check, check_settings, overlay, setting

TIMINGS = ("shared", "exclusive")
SEARCHES = ("none", "optuna")
DIRECTIONS = ("maximize", "minimize")


@dataclass(frozen=True)
class SweepPart:
    """One grid of a sweep."""

    overrides: list[str] = setting([], "Settings in Hydra's grammar: key=a,b and key=range(0,4) are choices.")
    seeds: int = setting(1, "Short for sweep.seeds.", low=1, high=10**4)
    timing: str = setting("shared", "Short for sweep.timing.", choices=TIMINGS)

    def __post_init__(self) -> None:
        check_settings("", self)


@dataclass(frozen=True)
class SweepConfig:
    """A grid of runs, or several."""

    name: str = setting("", "Name of the sweep's folder; empty is the experiment's name, else the run's.")
    seeds: int = setting(
        1, "Trains every configuration with seeds 0 to N-1, unless seed is swept itself.", low=1, high=10**4
    )
    # exclusive: one configuration after the other, seed by seed, so that a change of the machine affects all alike
    timing: str = setting(
        "shared",
        "Jobs run in parallel and no speed is reported (shared), or one at a time, alternated between "
        "configurations (exclusive).",
        choices=TIMINGS,
    )
    jobs: int = setting(0, "Most parallel jobs; 0: as many as the machine holds.", low=0, high=10**4)
    search: str = setting(
        "none",
        "Combinations of the choices to run: all (none), or those that Optuna's TPE sampler derives from earlier "
        "results (optuna), which also takes interval(a,b) and tag(log,interval(a,b)).",
        choices=SEARCHES,
    )
    trials: int = setting(20, "Combinations that a search tries, each with all seeds.", low=1, high=10**6)
    objective: str = setting(
        "heldout_accuracy",
        "The goal of a search: the held-out accuracy after training, or any metric, mean over the last tenth of the "
        "steps.",
    )
    direction: str = setting("maximize", "Whether a search maximizes or minimizes the objective.", choices=DIRECTIONS)
    parts: Any = setting(
        None, "Several grids by name (a grid of null is left out); null: the command line's choices.", entries=SweepPart
    )

    def __post_init__(self) -> None:
        check("/" not in self.name, f"sweep.name={self.name!r} must be a folder's name without a slash.")
        check_settings("sweep", self)
        self.grids  # noqa: B018  raises ConfigError for what cannot be read as parts

    @property
    def grids(self) -> dict[str, SweepPart]:
        """The grids by name, with seeds and timing filled in; a single unnamed one if none are given."""
        if self.parts is None:
            return {"": SweepPart(seeds=self.seeds, timing=self.timing)}
        named = {str(k): entry for k, entry in self.parts.items() if entry} if isinstance(self.parts, Mapping) else {}
        check(
            named and all(isinstance(entry, Mapping) for entry in named.values()),
            f"sweep.parts={self.parts} does not map names to grids; allowed: null, or such as "
            "{quality:{overrides:['async.lag=0,4']}}.",
        )
        default = SweepPart(seeds=self.seeds, timing=self.timing)
        return {str(name): overlay(default, entry, f"sweep.parts.{name}") for name, entry in named.items()}
