"""Calls a reward function; its results become scores and its errors RewardErrors.

The module imports little, because the sandbox's process imports it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from asyncrlhf.errors import RewardError

# Limits of one call's logging: names of metrics, columns, characters of a name and of a text.
MAX_METRICS, MAX_COLUMNS, MAX_NAME, MAX_TEXT = 32, 8, 64, 1000
_GIVEN = ("prompts", "completions", "log_extra", "log_metric")  # arguments other than columns


class WrongCountError(RewardError):
    """An answer that is not a list with one score per completion."""


@dataclass(frozen=True)
class TrainerState:
    """TRL's ``trainer_state``, as far as known here: ``global_step``, the newest policy version
    that sampled a token of the call's completions."""

    global_step: int


class CallLog:
    """The log of one call of a reward function, by TRL's ``log_metric`` and ``log_extra``; beyond their limits both
    raise ValueError, which fails the call.

    ``metrics``: each name's mean. ``extras``: one JSON object per completion, with its columns; empty without columns.
    """

    def __init__(self, completions: int) -> None:
        self._completions = completions
        self._values: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        """Names are cut to their letters, digits and ``_.+-``; values that are not finite are left out."""
        name = re.sub(r"[^\w.+-]", "_", str(name))[:MAX_NAME]
        if math.isfinite(number := float(value)):
            _room(self._values, name, MAX_METRICS, "log_metric takes at most {} names per call").append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """One value per completion."""
        name = str(column)[:MAX_NAME]
        told = _room(self._columns, name, MAX_COLUMNS, "log_extra takes at most {} columns per call")
        told.extend(map(_cell, values))
        if len(told) != self._completions:
            raise ValueError(f"log_extra({name!r}) got {len(told)} values for {self._completions} completions")

    @property
    def metrics(self) -> dict[str, float]:
        return {name: math.fsum(values) / len(values) for name, values in self._values.items()}

    @property
    def extras(self) -> list[dict[str, Any]]:
        return [{name: told[i] for name, told in self._columns.items()} for i in range(self._completions)]


def _room(kept: dict[str, list[Any]], name: str, most: int, sentence: str) -> list[Any]:
    if name not in kept and len(kept) == most:
        raise ValueError(sentence.format(most))
    return kept.setdefault(name, [])


def _cell(value: Any) -> Any:
    """The value in a form for JSON and tables: numbers unchanged, anything else as a text of limited length."""
    plain = value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)[:MAX_TEXT]


def call_function(
    function: Callable[..., Any], arguments: Mapping[str, Any], log: CallLog | None = None
) -> list[float | RewardError | None]:
    """One score, failure or None (no score) per completion; raises RewardError if the call itself failed. The result of
    an ``async`` function is awaited, in one event loop for all calls of the process. ``log``: collects the function's
    log."""
    if log is not None:
        arguments = {**arguments, "log_extra": log.extra, "log_metric": log.metric}
    _check_arguments(function, arguments)
    try:
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = _loop().run_until_complete(_awaited(returned))
        values = list(returned) if isinstance(returned, Iterable) else returned
    except RewardError:
        raise
    # The user's code may raise anything, SystemExit included; here it becomes one failed rollout.
    except BaseException as error:
        raise RewardError(f"The reward function raised {type(error).__name__}: {error}") from error
    return checked_scores(values, len(arguments["prompts"]), "The reward function", may_abstain=True)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Never closed: clients that a function keeps between its calls belong to this loop."""
    return asyncio.new_event_loop()


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except ValueError:  # a built-in without a signature
        return
    except TypeError as error:
        columns = ", ".join(name for name in arguments if name not in _GIVEN)
        raise RewardError(
            f"The reward function cannot be called with prompts, completions and the columns {columns} ({error}); "
            "write it as f(prompts, completions, **columns)."
        ) from error


LARGEST_SCORE = 1e9  # the learner computes in float32, where the squares of weighted sums have to be finite


def checked_scores(values: Any, count: int, who: str, *, may_abstain: bool = False) -> list[float | RewardError | None]:
    """``values`` as ``count`` scores; a value that is not a finite number is a single failure, None with
    ``may_abstain`` no score. Raises WrongCountError, with ``who`` as subject, for anything but a list of that
    length."""
    if not isinstance(values, list):
        raise WrongCountError(f"{who} returned {type(values).__name__}, not a list of numbers.")
    if len(values) != count:
        raise WrongCountError(f"{who} returned {len(values)} scores for {count} completions.")
    return [None if value is None and may_abstain else _score(value, who) for value in values]


def _score(value: Any, who: str) -> float | RewardError:
    try:
        # A string that reads like a number is a mistake of the reward function, not a score.
        score = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        return RewardError(f"{who} returned {value!r}, which is not a finite number.")
    if abs(score) > LARGEST_SCORE:
        return RewardError(f"{who} returned {value!r}; allowed: numbers from {-LARGEST_SCORE:g} to {LARGEST_SCORE:g}.")
    return score
