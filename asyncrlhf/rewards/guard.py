"""Finds and calls a reward function; its results become scores and its errors RewardErrors.

Light, for the sandbox's process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.plugins import load_function

COLUMNS = ("answer", "metadata", "completion_ids")


def call_function(function: Callable[..., Any], columns: dict[str, list[Any]]) -> list[float | RewardError]:
    """One score or failure a completion; raises RewardError when the call itself failed."""
    try:
        returned = function(**columns)
        values = list(returned) if isinstance(returned, Iterable) else returned
    except RewardError:
        raise
    # The user's code may raise anything, SystemExit included; here it becomes one failed rollout.
    except BaseException as error:
        raise RewardError(f"The reward function raised {type(error).__name__}: {error}") from error
    return checked_scores(values, len(columns["prompts"]), "The reward function")


def checked_scores(values: Any, count: int, who: str) -> list[float | RewardError]:
    """``values`` as ``count`` scores; one that is not a finite number is a failure of its own. Raises RewardError,
    whose subject is ``who``, for anything but a list of that length."""
    if not isinstance(values, list):
        raise RewardError(f"{who} returned {type(values).__name__}, not a list of numbers.")
    if len(values) != count:
        raise RewardError(f"{who} returned {len(values)} scores for {count} completions.")
    return [_score(value, who) for value in values]


def _score(value: Any, who: str) -> float | RewardError:
    try:
        # A string that reads like a number is a mistake of the reward function, not a score.
        score = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    return score if math.isfinite(score) else RewardError(f"{who} returned {value!r}, which is not a finite number.")


def load_target(target: str, key: str = "reward.target") -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the working directory is looked in too."""
    where, function = f"{key}={target}", load_function(key, target)
    try:
        inspect.signature(function).bind(prompts=[], completions=[], **{column: [] for column in COLUMNS})
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be called with prompts, completions and the columns {', '.join(COLUMNS)} ({error}); "
            "write it as f(prompts, completions, **columns)."
        ) from error
    return function
