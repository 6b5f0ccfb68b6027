"""The parts of a reward: functions with TRL's signature, sources of scores, and the scorer that adds them.

One failed rollout never fails others.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncrlhf.data.branches import last_branch
from asyncrlhf.errors import ConfigError, ReplicaError, RewardError
from asyncrlhf.rewards.guard import TrainerState, WrongCountError, call_function
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import Annotation, BatchFault, IntArray, Prompt, Rollout

# A finite number; the failure; or None, if the source gives no score.
Score = float | RewardError | None
# A function's log for a rollout: the call's metrics by name, the rollout's values by column.
Logged = tuple[Mapping[str, float], Mapping[str, Any]]


class RewardFunction(Protocol):
    """Scores completions. A reward function written for TRL's trainers works here unchanged.

    ``prompts`` are the task's texts (without chat template), ``completions`` the responses without special tokens;
    if the dataset has conversations, both are lists of messages, in an episode those of all its turns, with
    ``tool_calls``, and of the tools. The columns, each a list as long as ``prompts``: ``completion_ids`` (list of int;
    as in TRL, an episode's observed tokens are among them), those of the dataset's rows by name, and ``answer`` (str or
    None) and ``metadata`` (dict) unless the dataset has columns of these names; ``environments``, if there are any,
    with the plain attributes of each. ``trainer_state``, ``log_extra`` and ``log_metric`` are also passed;
    ``**columns`` takes the rest. Returns one finite number, or None for no score, per completion, in order. It may be
    ``async``.
    """

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> Sequence[float | None]: ...


class RewardSource:
    """One part of a reward: a function, a model, a judge, a service. ``in_process``: it is code on this machine, whose
    wrong number of scores is a bug, not a temporary failure."""

    in_process = False

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score or failure per rollout, in order.

        Raises RewardError if the call failed as a whole, so that each rollout should be scored alone, and
        ServiceError if it failed independently of the rollouts.
        """
        raise NotImplementedError

    def logged(self) -> dict[int, Logged]:
        """The function's log since the last call, by rollout id; cleared by this call."""
        return {}

    def close(self) -> None:
        """Close open resources; a second call does nothing."""


class LateError(RewardError):
    """A call took longer than its limit."""


class ServiceError(RewardError):
    """The service of a source failed: none of the call's rollouts has a score."""


class LateServiceError(ServiceError, LateError):
    """The service gave no answer in time. It may answer for fewer rollouts."""


class StuckError(ReplicaError):
    """A model's call does not end. Its rollouts have no result; the worker's owner must replace the worker."""


def columns_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The arguments of a user's reward function, in the form of its dataset: N prompts, N completions, N of each
    column of its rows, and TRL's further arguments."""
    plain = texts_of(rollouts)
    names = dict.fromkeys(name for r in rollouts for name in r.prompt.metadata)
    columns = {name: [r.prompt.metadata.get(name) for r in rollouts] for name in names}
    talks = [r.prompt.messages for r in rollouts]
    given = {
        "prompts": [text if talk is None else [*talk] for talk, text in zip(talks, plain["prompts"], strict=True)],
        "completions": [
            text if talk is None else [*rollout.messages] or [{"role": "assistant", "content": text}]
            for talk, text, rollout in zip(talks, plain["completions"], rollouts, strict=True)
        ],
        "completion_ids": plain["completion_ids"],
        "trainer_state": TrainerState(max((int(r.policy_versions.max(initial=0)) for r in rollouts), default=0)),
    }
    if any(r.environment is not None for r in rollouts):
        given["environments"] = [SimpleNamespace(**(r.environment or {})) for r in rollouts]
    # As in TRL, a column cannot replace the trainer's arguments, and the dataset's own completions are not passed.
    return {k: v for k, v in {**plain, **columns, **given}.items() if k not in ("prompt", "completion")}


def texts_of(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The arguments of endpoints and the task's rule: N prompts and N completions as texts, and three columns."""
    return {
        "prompts": [r.prompt.text for r in rollouts],
        "completions": [r.response_text for r in rollouts],
        "answer": [r.prompt.answer for r in rollouts],
        "metadata": [dict(r.prompt.metadata) for r in rollouts],
        "completion_ids": [_completion_ids(r).tolist() for r in rollouts],
    }


def _completion_ids(rollout: Rollout) -> IntArray:
    """[n] the response's tokens; of an episode that forks those that its last branch follows."""
    if not rollout.forks:
        return rollout.response_ids
    places = last_branch(rollout) - len(rollout.prompt.token_ids)
    return rollout.response_ids[places[places >= 0]]


NO_OPINION = "every reward function returned None for it"


class WeightedSource(NamedTuple):
    source: RewardSource
    weight: float = 1.0


class Scorer:
    """The parts of a reward and the penalties for length, as used by a reward worker.

    ``parts`` of a result: each part's raw score under its name (``score`` for a single part), and
    ``missing_eos`` and ``overlong`` if those penalties are on. The reward is the weighted sum of the scores and the
    sum of the penalties. If any part fails, the rollout has no reward. A part that returns None adds nothing; if
    all parts do, the rollout has no reward, and is ``abstained``.
    """

    def __init__(self, sources: dict[str, WeightedSource], config: RewardConfig, max_completion_length: int) -> None:
        if config.overlong_buffer > max_completion_length:
            raise ConfigError(
                f"reward.overlong_buffer={config.overlong_buffer} is longer than any response; allowed: at most "
                f"generator.max_completion_length={max_completion_length}."
            )
        self.sources = sources
        self._refused: Counter[str] = Counter()  # by part: batches in a row that failed, but not alone
        self._config = config
        self._max_completion_length = max_completion_length
        self._several = config.kind == "sum" or bool(config.reward_funcs)  # whether a failure names its part

    @property
    def source(self) -> str:
        """The settings that name the reward, for messages."""
        named = self._config.reward_funcs
        target = f"reward.reward_funcs=[{','.join(named)}]" if named else f"reward.target={self._config.target}"
        return f"reward.kind={self._config.kind}" + (f" {target}" if self._config.kind == "python" else "")

    def score(self, rollouts: Sequence[Rollout]) -> list[Annotation]:
        """One result per rollout, in order and with its id; a rollout without a valid score has ``error`` instead.

        A part scores all rollouts in one call if it can. After a call that failed as a whole it scores each
        rollout alone, unless the service failed; if single rollouts succeed but a batch does not (for a service
        twice in a row), it gets single rollouts from then on. A part does not score rollouts that an earlier one
        failed. Raises RewardError for a function that does not return one score per completion.
        """
        faults: list[BatchFault] = []
        parts: list[dict[str, float]] = [{} for _ in rollouts]
        errors: dict[int, str] = {}
        logged: list[dict[int, Logged]] = []
        for name, (source, _) in self.sources.items():
            left = [i for i in range(len(rollouts)) if i not in errors]
            for i, score in zip(left, self._scores(name, source, [rollouts[i] for i in left], faults), strict=True):
                if isinstance(score, RewardError):
                    errors[i] = f"{self._config.key(name)}: {score}" if self._several else str(score)
                elif score is not None:
                    parts[i][name] = score
            logged.append(source.logged())
        results = [
            Annotation(rollout.rollout_id, None, error=errors[i]) if i in errors else self._result(rollout, parts[i])
            for i, rollout in enumerate(rollouts)
        ]
        results = [
            _with_logged(result, [each[i] for each in logged if (i := result.rollout_id) in each]) for result in results
        ]
        return [replace(results[0], faults=tuple(faults)), *results[1:]] if faults else results

    def _scores(
        self, name: str, source: RewardSource, rollouts: Sequence[Rollout], faults: list[BatchFault]
    ) -> list[Score]:
        # A service may have failed temporarily; a function will hang again.
        allowed = 1 if source.in_process else 2
        if len(rollouts) <= 1 or self._refused[name] >= allowed:
            return [self._score(name, source, rollout) for rollout in rollouts]
        cause: RewardError
        try:
            scores = source.scores(rollouts)
            self._refused[name] = 0
            return scores
        except LateServiceError as error:
            # Either it is down, or the batch is too large for it: a single rollout shows which.
            first = self._score(name, source, rollouts[0])
            if isinstance(first, RewardError):
                return [error] * len(rollouts)
            cause, scores = error, [first, *(self._score(name, source, rollout) for rollout in rollouts[1:])]
        except ServiceError as error:
            return [error] * len(rollouts)
        except RewardError as error:
            self._refuse_bug(name, source, error)
            cause, scores = error, [self._score(name, source, rollout) for rollout in rollouts]
        kind = "late" if isinstance(cause, LateError) else "raised"
        kind = "wrong_count" if isinstance(cause, WrongCountError) else kind
        if kind != "raised" and not any(isinstance(score, RewardError) for score in scores):
            self._refused[name] += 1
        said = f"{cause} {len(rollouts)} rollouts were then scored one by one"
        said += ", as all others will be." if self._refused[name] >= allowed else "."
        faults.append(BatchFault(self._config.key(name), kind, said))
        return scores

    def _score(self, name: str, source: RewardSource, rollout: Rollout) -> Score:
        try:
            return source.scores([rollout])[0]
        except RewardError as error:
            self._refuse_bug(name, source, error)
            return error

    def _refuse_bug(self, name: str, source: RewardSource, error: RewardError) -> None:
        if source.in_process and isinstance(error, WrongCountError):
            raise WrongCountError(
                f"{self._config.key(name)}: {error} It must return a list with one number, or None, a completion."
            ) from error

    def _result(self, rollout: Rollout, parts: dict[str, float]) -> Annotation:
        if not parts:
            return Annotation(rollout.rollout_id, error=NO_OPINION, abstained=True)
        penalties: dict[str, float] = {}
        if self._config.missing_eos_penalty > 0:
            penalties["missing_eos"] = -self._config.missing_eos_penalty if rollout.finish_reason == "length" else 0.0
        if self._config.overlong_buffer > 0:
            penalties["overlong"] = overlong_penalty(
                sampled_tokens(rollout), self._max_completion_length, self._config.overlong_buffer
            )
        reward = sum(self.sources[name].weight * score for name, score in parts.items()) + sum(penalties.values())
        return Annotation(rollout.rollout_id, reward, parts | penalties)

    def close(self) -> None:
        for source, _ in self.sources.values():
            source.close()


def _with_logged(result: Annotation, logged: Sequence[Logged]) -> Annotation:
    """``result`` with the functions' logs; a name that several of them gave gets the mean."""
    if not logged:
        return result
    names = dict.fromkeys(name for metrics, _ in logged for name in metrics)
    means = {name: float(np.mean([metrics[name] for metrics, _ in logged if name in metrics])) for name in names}
    extra = {column: value for _, columns in logged for column, value in columns.items()}
    return replace(result, logged=means, extra=json.dumps(extra) if extra else "")


def sampled_tokens(rollout: Rollout) -> int:
    """The length that counts: without the tokens that an episode's environment wrote."""
    return int(np.count_nonzero(rollout.sampled))


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft over-length penalty (2503.14476, eq. 13) in [-1, 0]: it grows over the last ``buffer`` tokens."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))


def task_reward(task: Task) -> RewardFunction:
    """The task's rule with the signature of a reward function."""

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        answers: list[str | None] = columns["answer"]
        metadata: list[Mapping[str, Any]] = columns["metadata"]
        no_tokens = np.empty(0, dtype=np.int64)
        return [
            task.reward(Prompt(prompt_id="", text=text, token_ids=no_tokens, answer=answer, metadata=about), completion)
            for text, completion, answer, about in zip(prompts, completions, answers, metadata, strict=True)
        ]

    return reward


def said_last(rollout: Rollout) -> str:
    """What the model said last: an answer, or the text of an episode's last turn."""
    spoken = [message for message in rollout.messages if message["role"] == "assistant"]
    return str(spoken[-1]["content"]) if len(rollout.turns) > 1 and spoken else rollout.response_text


class FunctionSource(RewardSource):
    """A function with a time limit, in a thread: it cannot use ``signal``, and one that overruns is abandoned, because
    Python cannot stop it. A user's own function runs in a process instead (:mod:`~asyncrlhf.rewards.sandbox`). Of an
    episode it scores what the model said last."""

    in_process = True

    def __init__(self, function: RewardFunction, timeout_seconds: float) -> None:
        self._function = function
        self._timeout = timeout_seconds

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        columns = {**texts_of(rollouts), "completions": [said_last(rollout) for rollout in rollouts]}
        scores: list[Score] = call_with_timeout(lambda: call_function(self._function, columns), self._timeout)
        return scores


class LengthSource(RewardSource):
    """The number of sampled tokens, as a part of a sum."""

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [float(sampled_tokens(r)) for r in rollouts]


class EnvironmentSource(RewardSource):
    """The reward that an episode's environment gave; None if it gave none."""

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [rollout.episode_reward for rollout in rollouts]


def call_with_timeout(call: Callable[[], Any], seconds: float, who: str = "The reward function") -> Any:
    """The result of ``call``, or the RewardError that it raises; a RewardError if it takes longer than ``seconds``."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except RewardError as error:
            outcome.set_exception(error)

    # A daemon thread: if it never returns, it must not keep the process alive.
    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise LateError(late(who, seconds))
    if not outcome.done():
        raise RewardError(f"{who} ended its thread.")
    return outcome.result()


def late(who: str, seconds: float, setting: str = "reward.timeout_seconds") -> str:
    return f"{who} took longer than {setting}={seconds:g}."
