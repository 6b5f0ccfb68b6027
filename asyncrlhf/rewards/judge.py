"""Scores from a generative judge: a question a rollout, and a number read from its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards.endpoint import Endpoint
from asyncrlhf.rewards.reward import Score, ServiceError
from asyncrlhf.rewards.service_config import HttpConfig, JudgeConfig
from asyncrlhf.types import Rollout

SHOWN = 120  # characters of an answer in a message


class ChatModel(Protocol):
    """What answers the questions: an endpoint or a vLLM engine."""

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        """One text or failure a question, in order."""
        ...

    def close(self) -> None: ...


class JudgeSource:
    def __init__(self, config: JudgeConfig, model: ChatModel) -> None:
        self._config = config
        self._model = model
        self._pattern = re.compile(config.pattern)

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        answers = self._model.answers([self.question(rollout) for rollout in rollouts])
        services = [a for a in answers if isinstance(a, ServiceError)]
        if answers and len(services) == len(answers):
            raise services[0]
        return [a if isinstance(a, RewardError) else self.read(a) for a in answers]

    def question(self, rollout: Rollout) -> str:
        return self._config.template.format(
            prompt=rollout.prompt.text, response=rollout.response_text, answer=rollout.prompt.answer or ""
        )

    def read(self, answer: str) -> Score:
        """The last match of the pattern: a judge that reasons first names other numbers before it."""
        found = self._pattern.findall(answer)
        if not found:
            return RewardError(f"The judge's answer holds no score ({answer[-SHOWN:]!r}).")
        try:
            score = float(found[-1])
        except ValueError:
            return RewardError(f"The judge's score {found[-1][:SHOWN]!r} is no number.")
        if not self._config.low <= score <= self._config.high:
            return RewardError(
                f"The judge's score {score:g} lies outside {self._config.low:g} to {self._config.high:g}."
            )
        return score

    def close(self) -> None:
        self._model.close()


class ChatEndpoint:
    """A server that speaks OpenAI's ``/chat/completions``, such as ``vllm serve``."""

    def __init__(self, config: JudgeConfig, http: HttpConfig, timeout_seconds: float) -> None:
        self._config = config
        self._endpoint = Endpoint(http, timeout_seconds, path="/chat/completions")
        self._pool = ThreadPoolExecutor(config.concurrency, thread_name_prefix="judge")

    def answers(self, questions: Sequence[str]) -> list[str | RewardError]:
        return list(self._pool.map(self._answer, questions))

    def _answer(self, question: str) -> str | RewardError:
        document = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        try:
            answer: str = self._endpoint.ask(document, self._text)
        except RewardError as error:
            return error
        return answer

    def _text(self, answer: Any) -> str:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(f"{self._endpoint.who} answered no choices[0].message.content.") from error
        if not isinstance(text, str):
            raise RewardError(f"{self._endpoint.who} answered {type(text).__name__} where the judge's text belongs.")
        return text

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
