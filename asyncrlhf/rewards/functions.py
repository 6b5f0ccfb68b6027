"""Where reward functions come from: the task's own rule, or a Python function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrlhf.errors import ConfigError
from asyncrlhf.plugins import load_function
from asyncrlhf.rewards.base import RewardFunction
from asyncrlhf.tasks.base import Task
from asyncrlhf.types import Prompt

COLUMNS = ("answer", "metadata", "completion_ids")


def task_reward(task: Task) -> RewardFunction:
    """The task's rule under the signature of a reward function."""

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        answers: list[str | None] = columns["answer"]
        metadata: list[Mapping[str, Any]] = columns["metadata"]
        no_tokens = np.empty(0, dtype=np.int64)
        return [
            task.reward(Prompt(prompt_id="", text=text, token_ids=no_tokens, answer=answer, metadata=about), completion)
            for text, completion, answer, about in zip(prompts, completions, answers, metadata, strict=True)
        ]

    return reward


def load_target(target: str) -> RewardFunction:
    """The function that ``package.module:function`` names; the working directory is looked in too."""
    where, function = f"reward.target={target}", load_function("reward.target", target)
    try:
        inspect.signature(function).bind(prompts=[], completions=[], **{column: [] for column in COLUMNS})
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be called with prompts, completions and the columns {', '.join(COLUMNS)} ({error}); "
            "write it as f(prompts, completions, **columns)."
        ) from error
    return function
