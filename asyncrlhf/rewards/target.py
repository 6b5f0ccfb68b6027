"""Finds the reward function that ``reward.target`` names; light, for the sandbox's process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import load_function

COLUMNS = ("answer", "metadata", "completion_ids")


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
