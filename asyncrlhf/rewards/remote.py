"""Scores from a remote endpoint: one POST a batch, one number a rollout back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards.base import Score, columns_of
from asyncrlhf.rewards.endpoint import Endpoint
from asyncrlhf.rewards.guard import checked_scores
from asyncrlhf.rewards.service_config import HttpConfig
from asyncrlhf.types import Rollout


class HttpSource:
    """Sends the columns of a reward function as a JSON object of lists: ``prompts``, ``completions``, ``answer``,
    ``metadata`` and ``completion_ids``. Takes ``{"rewards": [...]}`` or the bare list of numbers, in order."""

    def __init__(self, config: HttpConfig, timeout_seconds: float) -> None:
        self._endpoint = Endpoint(config, timeout_seconds)

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        count, who = len(rollouts), self._endpoint.who

        def parse(answer: Any) -> list[Score]:
            scores = checked_scores(answer.get("rewards") if isinstance(answer, dict) else answer, count, who)
            causes = [score for score in scores if isinstance(score, RewardError)]
            if len(causes) == count:
                raise causes[0]  # all nonsense: a failure of the service, which its breaker should count
            return scores

        scores: list[Score] = self._endpoint.ask(columns_of(rollouts), parse)
        return scores

    def close(self) -> None:
        """Nothing is held open that does not end with the worker."""
