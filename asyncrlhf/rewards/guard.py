"""Finds and calls a reward function; its results become scores and its errors RewardErrors.

Light, for the sandbox's process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from asyncrlhf.errors import RewardError
from asyncrlhf.plugins import load_function


class WrongCountError(RewardError):
    """An answer that is not a list with one score a completion."""


@dataclass(frozen=True)
class TrainerState:
    """What TRL hands over as ``trainer_state``, as far as it is known here: ``global_step``, the newest policy version
    that sampled a token of the call's completions."""

    global_step: int


def log_extra(column: str, values: Sequence[Any]) -> None:
    """TRL's keyword of this name; nothing is kept, for ``rollouts/*.parquet`` has the completions already."""


def log_metric(name: str, value: float) -> None:
    """TRL's keyword of this name; nothing is kept."""


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | RewardError | None]:
    """One score, failure or None (no opinion) a completion; raises RewardError when the call itself failed. What an
    ``async`` function returns is awaited, in one event loop for all calls of the process."""
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
    """Never closed: clients that a function keeps between its calls belong to the loop that they were made in."""
    return asyncio.new_event_loop()


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except ValueError:  # a built-in without a signature
        return
    except TypeError as error:
        columns = ", ".join(name for name in arguments if name not in ("prompts", "completions"))
        raise RewardError(
            f"The reward function cannot be called with prompts, completions and the columns {columns} ({error}); "
            "write it as f(prompts, completions, **columns)."
        ) from error


def checked_scores(values: Any, count: int, who: str, *, may_abstain: bool = False) -> list[float | RewardError | None]:
    """``values`` as ``count`` scores; one that is not a finite number is a failure of its own, None with
    ``may_abstain`` no opinion. Raises WrongCountError, whose subject is ``who``, for anything but a list of that
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
    return score if math.isfinite(score) else RewardError(f"{who} returned {value!r}, which is not a finite number.")


def load_target(target: str, key: str = "reward.target") -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the working directory is looked in too."""
    return load_function(key, target)
