"""Remote endpoints: one POST per batch, retries and limits; a reward from an endpoint, one number per rollout."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from asyncrlhf.errors import RewardError
from asyncrlhf.redaction import hide, redact
from asyncrlhf.rewards.guard import checked_scores
from asyncrlhf.rewards.reward import (
    LateError,
    LateServiceError,
    RewardSource,
    Score,
    ServiceError,
    call_with_timeout,
    late,
    texts_of,
)
from asyncrlhf.rewards.reward_config import HttpConfig
from asyncrlhf.types import Rollout

# Answers that a retry may change; any other failure means that the request itself was refused.
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
ANSWER_BYTES = 64 << 20
REDIRECTS = 3
# Before the first retry, doubled each time; and how long an endpoint that keeps failing is left alone.
BACKOFF_SECONDS, PAUSE_SECONDS = 0.5, 30.0
SHOWN = 200  # characters of an answer in a message


class Breaker:
    """Blocks calls to a service for ``seconds`` after ``failures`` failures in a row; then lets one call through as a
    test.

    Safe to use from several threads. ``clock`` gives seconds.
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowed = failures
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None
        self._cause = ""

    def enter(self, who: str) -> None:
        """Raise ServiceError while calls are blocked. After that time one caller may pass; others wait for its
        result."""
        with self._lock:
            if self._open_until is None:
                return
            if self._clock() < self._open_until:
                raise ServiceError(
                    f"{who} is not called for {self._seconds:g} s after {self._failures} failures in a row, the last "
                    f"one: {self._cause}"
                )
            self._open_until = self._clock() + self._seconds

    def failed(self, cause: str) -> None:
        with self._lock:
            self._failures += 1
            self._cause = cause
            if self._failures >= self._allowed:
                self._open_until = self._clock() + self._seconds

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._open_until = None


class Endpoint:
    """POSTs JSON to ``config.url`` + ``path``; ``timeout_seconds`` limits one whole try."""

    def __init__(self, config: HttpConfig, timeout_seconds: float, path: str = "") -> None:
        self._config = config
        self._timeout = timeout_seconds
        self.url = config.url.rstrip("/") + path if path else config.url
        self.who = f"The endpoint {redact(self.url)}"
        self._breaker = Breaker(config.breaker_failures, PAUSE_SECONDS)

    def ask(self, document: Any, parse: Callable[[Any], Any]) -> Any:
        """``parse`` of the JSON answer. Raises ServiceError if no try gets an answer, RewardError if ``parse`` rejects
        it."""
        try:
            body = json.dumps(document, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(f"The rollouts cannot be sent to {self.url} as JSON: {error}.") from error
        self._breaker.enter(self.who)
        try:
            value = parse(self._answer(body))
        except RewardError as error:
            self._breaker.failed(str(error))
            raise
        self._breaker.succeeded()
        return value

    def _answer(self, body: bytes) -> Any:
        was_late = False
        for tried in range(self._config.retries + 1):
            wait = BACKOFF_SECONDS * 2**tried * random.uniform(0.5, 1.0)
            try:  # the timeout of requests bounds only the pause between two bytes
                response: requests.Response = call_with_timeout(lambda: self._post(body), self._timeout, self.who)
            except RewardError as error:
                cause, was_late = str(error), isinstance(error, LateError)
            else:
                was_late = False
                if response.status_code not in TRY_AGAIN:
                    return self._document(response)
                cause = f"{self.who} answered {_status(response)}."
                wait = max(wait, min(_retry_after(response), self._timeout))
            if tried < self._config.retries:
                time.sleep(wait)
        raise (LateServiceError if was_late else ServiceError)(f"{cause} Tried {self._config.retries + 1} times.")

    def _post(self, body: bytes) -> requests.Response:
        try:
            response = self._ask_at(self.url, body)
            for _ in range(REDIRECTS):
                if response.status_code not in (307, 308) or self._elsewhere(response):
                    break
                response = self._ask_at(urljoin(response.url, response.headers["Location"]), body)
            return response
        except requests.Timeout as error:
            raise LateError(late(self.who, self._timeout)) from error
        except requests.RequestException as error:
            raise RewardError(f"{self.who} did not answer: {_cause(error)}.") from error

    def _ask_at(self, url: str, body: bytes) -> requests.Response:
        """POST to ``url`` without following redirects. Raises RewardError if the answer exceeds ``ANSWER_BYTES``."""
        options: dict[str, Any] = {"timeout": self._timeout, "headers": self._headers()}
        with requests.post(url, data=body, allow_redirects=False, stream=True, verify=True, **options) as response:
            content = b""
            for chunk in response.iter_content(1 << 16):
                content += chunk
                if len(content) > ANSWER_BYTES:
                    raise RewardError(f"{self.who} answered more than {ANSWER_BYTES >> 20} MiB.")
            response._content = content  # where requests itself keeps it
            return response

    def _elsewhere(self, response: requests.Response) -> bool:
        """Whether a redirect has no target or one of another origin, which must get neither rollouts nor
        credentials."""
        target = urlsplit(urljoin(response.url, response.headers.get("Location", "")))
        asked = urlsplit(response.url)
        return "Location" not in response.headers or (target.scheme, target.hostname, target.port) != (
            asked.scheme,
            asked.hostname,
            asked.port,
        )

    def _headers(self) -> Mapping[str, str]:
        token = os.environ.get(self._config.token_env) if self._config.token_env else None
        hide(token or "")  # a service may repeat it in its answer
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def _document(self, response: requests.Response) -> Any:
        if 300 <= response.status_code < 400:
            to = redact(response.headers.get("Location", "no address"))
            raise ServiceError(
                f"{self.who} answered {response.status_code} {response.reason} and redirects to {to[:SHOWN]}; only "
                "307 and 308 within one origin are followed; give the final address as the url."
            )
        if not response.ok:
            raise RewardError(f"{self.who} answered {_status(response)}.")
        try:
            return response.json()
        except ValueError as error:
            raise RewardError(f"{self.who} answered no JSON: {redact(response.text[:SHOWN])!r}.") from error


def _status(response: requests.Response) -> str:
    said = redact(" ".join(response.text[:SHOWN].split()))
    return f"{response.status_code} {response.reason}" + (f" ({said})" if said else "")


def _cause(error: BaseException) -> str:
    """The innermost error that requests and urllib3 have wrapped: that of the socket."""
    inner = getattr(error, "reason", None) or (error.args[-1] if error.args else None)
    if isinstance(inner, BaseException):
        return _cause(inner)
    lines = str(error).strip().splitlines()
    return lines[0].rpartition(": ")[2][:SHOWN].rstrip(".") if lines else type(error).__name__


def _retry_after(response: requests.Response) -> float:
    """The seconds of Retry-After; its other form, a date, is ignored."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


class HttpSource(RewardSource):
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
                raise causes[0]  # no usable answer: a failure of the service, which its breaker should count
            return scores

        scores: list[Score] = self._endpoint.ask(texts_of(rollouts), parse)
        return scores
