"""Range checks for config leaves: each raises one sentence that names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any

from asyncrlhf.errors import ConfigError


def check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ConfigError(f"{key}={value} is not known{hint}; allowed: {', '.join(allowed)}.")


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`` (did you mean X?)`` with what is nearest to ``word``, to put into a sentence; empty where nothing is near."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_range(
    key: str,
    value: float,
    *,
    low: float | None = None,
    high: float | None = None,
    exclusive_low: bool = False,
    exclusive_high: bool = False,
) -> None:
    """Raise unless ``low <= value <= high``, ``exclusive_*`` without the bound itself; NaN and infinity never pass."""
    above = low is None or (value > low if exclusive_low else value >= low)
    below = high is None or (value < high if exclusive_high else value <= high)
    if above and below and math.isfinite(value):
        return
    bounds = []
    if low is not None:
        bounds.append(f"{'>' if exclusive_low else '>='} {low}")
    if high is not None:
        bounds.append(f"{'<' if exclusive_high else '<='} {high}")
    if (above and below) or not bounds:
        bounds.append("finite")
    raise ConfigError(f"{key}={value} is out of range; allowed: {' and '.join(bounds)}.")


def check(condition: Any, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def check_package(what: str, package: str, extra: str) -> None:
    """Raise unless ``package`` (its name on PyPI) is installed: ``what`` needs it, and our ``extra`` brings it."""
    check(
        importlib.util.find_spec(package.replace("-", "_")),
        f"{what} needs the package {package}, which is not installed: pip install 'asyncrlhf[{extra}]'.",
    )
