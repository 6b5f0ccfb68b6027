"""The choices of a search, in Hydra's grammar: ``a,b``, ``range(1,5)``, ``interval(0,1)``, ``tag(log,...)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from asyncrlhf.config.compose import hydra_sentence, sweep_jobs
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check

DIGITS = 4  # of a number that a search chooses: names stay short


@dataclass(frozen=True)
class Axis:
    """One setting of several values: ``choices``, or numbers from ``low`` to ``high`` (whole ones with ``step``)."""

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: int | None = None
    log: bool = False
    interval: bool = False

    @property
    def first(self) -> str:
        return self.choices[0] if self.choices else self.text(self.low)

    def value(self, text: str) -> str | int | float:
        """The value for Optuna of an override's ``text``."""
        return text if self.choices else int(text) if self.step else float(text)

    def text(self, value: Any) -> str:
        """``value`` as an override writes it."""
        return str(value) if self.choices else str(round(value)) if self.step else f"{value:.{DIGITS}g}"

    def plain(self) -> str:
        """In readable form: ``learning_rate: 1e-06 to 0.001 (log)``."""
        if self.choices:
            return f"{self.key}: {', '.join(self.choices)}"
        return f"{self.key}: {self.text(self.low)} to {self.text(self.high)}{' (log)' if self.log else ''}"


def split_space(overrides: Sequence[str]) -> tuple[list[str], list[Axis]]:
    """The overrides with one value, and the axes of the others."""
    fixed, axes = [], []
    for override in overrides:
        try:
            parsed = OverridesParser.create().parse_override(override)
        except HydraException as error:
            raise ConfigError(hydra_sentence(error)) from error
        if parsed.is_sweep_override():
            axes.append(_axis(parsed, override))
        else:
            fixed.append(override)
    return fixed, axes


def _axis(parsed: Override, override: str) -> Axis:
    key, given = str(parsed.get_key_element()), parsed.value()
    if isinstance(given, IntervalSweep):
        assert given.start is not None and given.end is not None, "Hydra's grammar asks for both"
        low, high, log = given.start, given.end, "log" in given.tags
        check(low < high, f"{override}: an interval needs its lower end first.")
        check(not log or low > 0, f"{override}: a logarithmic interval needs a lower end above 0.")
        whole = isinstance(low, int) and isinstance(high, int)
        return Axis(key, low=low, high=high, step=1 if whole else None, log=log, interval=True)
    if isinstance(given, RangeSweep):
        start, stop, step = given.start, given.stop, given.step
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step > 0 and start < stop:
            return Axis(key, low=start, high=range(start, stop, step)[-1], step=step)
    return Axis(key, tuple(job[0].partition("=")[2] for job in sweep_jobs([override])))
