"""What the report's tables are made of: a table of text, and numbers written for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """A table of text, for HTML and for the terminal alike."""

    title: str
    header: list[str]
    rows: list[list[str]]


def number(value: float | None, template: str) -> str:
    return MISSING if value is None else template.format(value)


def spread(found: Sequence[float | None], template: str) -> str:
    """Mean and sample standard deviation of those that are known."""
    known = [value for value in found if value is not None]
    if not known:
        return MISSING
    middle = template.format(statistics.fmean(known))
    return f"{middle} ± {template.format(statistics.stdev(known))}" if len(known) > 1 else middle
