"""Scores from functions of this process: the task's own rule, and the length of the response."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards.guard import call_function
from asyncrlhf.rewards.reward import RewardFunction, RewardSource, Score, columns_of
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import Prompt, Rollout


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


class FunctionSource(RewardSource):
    """A function with a time limit, in a thread: it cannot use ``signal``, and one that overruns is left behind, for
    Python cannot stop it. A user's own function runs in a process instead (:mod:`~asyncrlhf.rewards.sandbox`)."""

    def __init__(self, function: RewardFunction, timeout_seconds: float) -> None:
        self._function = function
        self._timeout = timeout_seconds

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        columns = columns_of(rollouts)
        scores: list[Score] = call_with_timeout(lambda: call_function(self._function, columns), self._timeout)
        return scores


class LengthSource(RewardSource):
    """The number of response tokens, for a sum that weighs it."""

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [float(len(r.response_ids)) for r in rollouts]


def call_with_timeout(
    call: Callable[[], Any],
    seconds: float,
    who: str = "The reward function",
    on_timeout: Callable[[], None] | None = None,
) -> Any:
    """What ``call`` returns, or the RewardError that it raises; a RewardError when it takes longer than ``seconds``."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except RewardError as error:
            outcome["error"] = error

    # A daemon thread: one that never returns must not keep the process alive.
    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        if on_timeout is not None:
            on_timeout()
        raise RewardError(late(who, seconds))
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome:
        raise RewardError(f"{who} ended its thread.")
    return outcome["value"]


def late(who: str, seconds: float, setting: str = "reward.timeout_seconds") -> str:
    return f"{who} took longer than {setting}={seconds:g}."
