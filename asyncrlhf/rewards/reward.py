"""What a reward is made of: reward functions under TRL's signature, and sources of scores behind a scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from asyncrlhf.errors import ReplicaError, RewardError
from asyncrlhf.types import Rollout

# A finite number, or why there is none.
Score = float | RewardError


class RewardFunction(Protocol):
    """Scores completions. A reward function written for TRL's trainers works here as it is.

    ``prompts`` are the task's texts (without chat template), ``completions`` the responses without special tokens. The
    columns, each a list as long as ``prompts``: ``answer`` (str or None), ``metadata`` (dict) and ``completion_ids``
    (list of int). More may come; take them up in ``**columns``. Returns one finite number a completion, in order.
    """

    def __call__(self, prompts: list[str], completions: list[str], **columns: list[Any]) -> Sequence[float]: ...


class RewardSource(Protocol):
    """One part of a reward: a function, a model, a judge, a service."""

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score or failure a rollout, in order.

        Raises RewardError when the call failed as a whole, so that single rollouts are worth a call of their own, and
        ServiceError when it failed whatever the rollouts were.
        """
        ...

    def close(self) -> None:
        """End what it holds open; a second call does nothing."""
        ...


class ServiceError(RewardError):
    """The service behind a source is out of order: none of the call's rollouts has a score."""


class StuckError(ReplicaError):
    """A model's call does not end. Nothing is known of its rollouts; the worker's owner must replace it."""


def columns_of(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The arguments of a reward function: N prompts, N completions and the other columns."""
    return {
        "prompts": [r.prompt.text for r in rollouts],
        "completions": [r.response_text for r in rollouts],
        "answer": [r.prompt.answer for r in rollouts],
        "metadata": [dict(r.prompt.metadata) for r in rollouts],
        "completion_ids": [r.response_ids.tolist() for r in rollouts],
    }
