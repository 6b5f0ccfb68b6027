"""Range checks for config leaves: each raises one sentence that names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrlhf.errors import ConfigError

Settings = TypeVar("Settings")


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


def check_ranges(where: str, settings: object, *names: str, **bounds: Any) -> None:
    """As :func:`check_range`, of these settings under ``where``."""
    for name in names:
        check_range(f"{where}.{name}" if where else name, getattr(settings, name), **bounds)


def check(condition: Any, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def check_keywords(key: str, value: Any) -> None:
    """Raise unless ``value`` is None or keywords by name."""
    check(
        value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)),
        f"{key}={value} are no keywords by name; allowed: null, or such as {{NAME:VALUE}}.",
    )


def check_package(what: str, package: str, extra: str) -> None:
    """Raise unless ``package`` (its name on PyPI) is installed: ``what`` needs it, and our ``extra`` brings it."""
    check(
        importlib.util.find_spec(package.replace("-", "_")),
        f"{what} needs the package {package}, which is not installed: pip install 'asyncrlhf[{extra}]'.",
    )


def overlay(base: Settings, changes: Mapping[str, Any], where: str) -> Settings:
    """``base``, a frozen dataclass of settings, with ``changes`` in it, at any depth; raises ConfigError naming the
    key."""
    names = [f.name for f in fields(base)]  # type: ignore[arg-type]
    for key, value in changes.items():
        if key not in names:
            hint = did_you_mean(str(key), names)
            raise ConfigError(f"{where}.{key} is not a setting{hint}; allowed in {where}: {', '.join(sorted(names))}.")
        own = getattr(base, key)
        if is_dataclass(own) and isinstance(value, Mapping):
            base = replace(base, **{key: overlay(own, value, f"{where}.{key}")})  # type: ignore[type-var]
            continue
        node = OmegaConf.structured(base)
        OmegaConf.set_readonly(node, False)
        try:
            base = OmegaConf.to_object(OmegaConf.merge(node, {key: value}))  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            kind = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(f"{where}.{key}={value} is of the wrong kind: {kind}.") from None
        except ConfigError as error:
            raise ConfigError(f"In {where}: {error}") from None
    return base
