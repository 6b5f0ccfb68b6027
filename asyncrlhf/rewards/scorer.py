"""Scores rollouts with a reward function, so that one bad rollout never takes others with it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.base import RewardFunction
from asyncrlhf.rewards.config import RewardConfig
from asyncrlhf.rewards.functions import load_target, task_reward
from asyncrlhf.tasks.base import Task
from asyncrlhf.types import Prompt, RewardResult, Rollout


class Scorer:
    """A reward function with its guards: time limit, checks of what it returns, penalties for length.

    The function runs in a thread of its own, so it cannot use ``signal``; one that overruns its time is left behind in
    that thread, for Python cannot stop it. ``parts`` of a result: ``score`` as the function gave it, and
    ``missing_eos`` and ``overlong`` where those penalties are on; the reward is their sum.
    """

    def __init__(self, function: RewardFunction, config: RewardConfig, max_completion_length: int) -> None:
        if config.overlong_buffer > max_completion_length:
            raise ConfigError(
                f"reward.overlong_buffer={config.overlong_buffer} is wider than a response can be; "
                f"allowed: at most generator.max_completion_length={max_completion_length}."
            )
        self._function = function
        self._config = config
        self._max_completion_length = max_completion_length

    @property
    def source(self) -> str:
        """The settings that name the function, for messages."""
        target = f" reward.target={self._config.target}" if self._config.kind == "python" else ""
        return f"reward.kind={self._config.kind}{target}"

    def score(self, rollouts: Sequence[Rollout]) -> list[RewardResult]:
        """One result a rollout, in order and with its id; a rollout without a valid score has ``error`` instead.

        All go through one call if they can within ``reward.timeout_seconds``; after a call that raises, overruns or
        returns another number of scores, each is scored alone, with that time of its own.
        """
        if not rollouts:
            return []
        try:
            values = self._call(rollouts)
        except RewardError as error:
            if len(rollouts) == 1:
                return [RewardResult(rollouts[0].rollout_id, None, error=str(error))]
            return [result for rollout in rollouts for result in self.score([rollout])]
        return [self._result(rollout, value) for rollout, value in zip(rollouts, values, strict=True)]

    def _call(self, rollouts: Sequence[Rollout]) -> list[Any]:
        returned = call_with_timeout(
            lambda: self._function(
                prompts=[r.prompt.text for r in rollouts],
                completions=[r.response_text for r in rollouts],
                answer=[r.prompt.answer for r in rollouts],
                metadata=[dict(r.prompt.metadata) for r in rollouts],
                completion_ids=[r.response_ids.tolist() for r in rollouts],
            ),
            self._config.timeout_seconds,
        )
        try:
            values = list(returned)
        except TypeError as error:
            raise RewardError(
                f"The reward function returned {type(returned).__name__}, not a list of numbers."
            ) from error
        if len(values) != len(rollouts):
            raise RewardError(f"The reward function returned {len(values)} scores for {len(rollouts)} completions.")
        return values

    def _result(self, rollout: Rollout, value: Any) -> RewardResult:
        try:
            # A string that reads like a number is a mistake of the function, not a score.
            score = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            error = f"The reward function returned {value!r}, which is not a finite number."
            return RewardResult(rollout.rollout_id, None, error=error)
        parts = {"score": score}
        if self._config.missing_eos_penalty > 0:
            parts["missing_eos"] = -self._config.missing_eos_penalty if rollout.finish_reason == "length" else 0.0
        if self._config.overlong_buffer > 0:
            parts["overlong"] = overlong_penalty(
                len(rollout.response_ids), self._max_completion_length, self._config.overlong_buffer
            )
        return RewardResult(rollout.rollout_id, sum(parts.values()), parts)


def build_scorer(config: RewardConfig, task: Task, max_completion_length: int) -> Scorer:
    """The scorer that ``reward.*`` asks for; raises ConfigError for a target that cannot be loaded."""
    function = load_target(config.target) if config.kind == "python" else task_reward(task)
    return Scorer(function, config, max_completion_length)


def preflight(scorer: Scorer, prompt: Prompt) -> None:
    """Score one probe, the reference answer or else the prompt's own text; ConfigError if that gives no score."""
    probe = Rollout(
        rollout_id=-1,
        group_id=-1,
        prompt=prompt,
        response_ids=prompt.token_ids,
        behavior_logprobs=np.zeros(len(prompt.token_ids), dtype=np.float32),
        policy_versions=np.zeros(len(prompt.token_ids), dtype=np.int64),
        finish_reason="stop",
        response_text=prompt.answer or prompt.text,
        generator_id="preflight",
    )
    (result,) = scorer.score([probe])
    if result.error is not None:
        raise ConfigError(f"{scorer.source} gives no score for a first probe: {result.error}")


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft over-length penalty (2503.14476, eq. 13) in [-1, 0]: it grows over the last ``buffer`` tokens."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))


def call_with_timeout(call: Callable[[], Any], seconds: float) -> Any:
    """What ``call`` returns; raises RewardError with one sentence when it raises or takes longer than ``seconds``."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        # The user's code may raise anything, SystemExit included; here it becomes one failed rollout.
        except BaseException as error:
            outcome["error"] = error

    # A daemon thread: one that never returns must not keep the process alive.
    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RewardError(f"The reward function took longer than reward.timeout_seconds={seconds:g}.")
    if "error" in outcome:
        error = outcome["error"]
        if isinstance(error, RewardError):
            raise error
        raise RewardError(f"The reward function raised {type(error).__name__}: {error}") from error
    return outcome["value"]
