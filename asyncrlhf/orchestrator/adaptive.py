"""The staleness bound in force: with ``async.adaptive`` it follows the effective sample size, otherwise it is fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrlhf.buffer.async_config import AsyncConfig

# Of whole sequences: on tokens even ruinous staleness leaves most of the sample effective. The share that VCPO's
# learning rate reads (2602.17616).
METRIC = "ess_fraction_seq"
# Single batches differ: a look is at the mean of five, and only four good ones in a row raise the bound.
STEPS, GOOD_LOOKS = 5, 4


class AdaptiveBound:
    """Adjusts the staleness bound from the mean ESS fraction of every ``STEPS`` steps: a mean under ``ess_floor``
    halves the bound, ``GOOD_LOOKS`` means at or above it in a row raise the bound by one step. Additive increase with
    multiplicative decrease keeps the bound near the highest that the data allow."""

    def __init__(self, config: AsyncConfig) -> None:
        self._config = config
        self._seen: list[float] = []
        self._good = 0
        self.bound = config.bound

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Take one step's metrics; returns a sentence if the bound changed. A step without a finite ESS is ignored."""
        ess = metrics.get(METRIC, math.nan)
        if not self._config.adaptive or not math.isfinite(ess):
            return None
        self._seen.append(ess)
        if len(self._seen) < STEPS:
            return None
        mean = sum(self._seen) / len(self._seen)
        self._seen = []
        before, self.bound = self.bound, self._next(mean)
        if self.bound == before:
            return None
        floor = self._config.ess_floor
        return f"Staleness bound {before} -> {self.bound}: {METRIC} was {mean:.2f} over {STEPS} steps, " + (
            f"under async.ess_floor={floor:g}." if mean < floor else f"async.ess_floor={floor:g} is kept."
        )

    def _next(self, mean: float) -> int:
        if mean < self._config.ess_floor:
            self._good = 0
            return max(self._config.min_staleness, self.bound // 2)
        self._good += 1
        if self._good < GOOD_LOOKS:
            return self.bound
        self._good = 0
        return min(self._config.bound, self.bound + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self.bound, "seen": list(self._seen), "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore within the present settings' limits; a run without ``adaptive`` keeps the bound of its settings."""
        if self._config.adaptive:
            self.bound = min(max(state["bound"], self._config.min_staleness), self._config.bound)
            self._seen, self._good = list(state["seen"]), state["good"]
