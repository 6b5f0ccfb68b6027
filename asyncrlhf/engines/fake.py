"""The fake engine: no model, responses whose lengths and latencies are drawn from the request's seed."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncrlhf.engines.engine import CacheMode, Engine, StepOutput
from asyncrlhf.engines.generator_config import FakeConfig
from asyncrlhf.types import FinishReason, FloatArray, GenerationFailure, GenerationRequest, IntArray, Rollout

AnswerIds = Callable[[GenerationRequest], IntArray | None]  # the reference answer's tokens, without a stop token

_CLOCK_TOLERANCE = 1e-6  # seconds: precision of sums of wall-clock times


@dataclass
class _Draft:
    """The planned response of a request, and the part already made. Times are of the engine's own clock."""

    request: GenerationRequest
    response_ids: IntArray  # [L]
    logprobs: FloatArray  # [L]
    reason: FinishReason
    latency: float
    fails: bool
    start: float = 0.0
    versions: list[int] = field(default_factory=list)

    def made_until(self, clock: float) -> int:
        if clock >= self.start + self.latency - _CLOCK_TOLERANCE:
            return len(self.response_ids)
        return int(len(self.response_ids) * (clock - self.start) / self.latency)


class FakeEngine(Engine):
    """``Engine`` over a simulated server of ``slots`` places; see :class:`FakeConfig` for its distributions.

    A response's tokens are made evenly over its latency, and tagged with the version of the first step after they are
    due, so a caller steps once before it loads weights if the tags are to change within a sequence. A step in which
    responses end counts only their tokens, so that its cost does not grow with the slots; another step counts all that
    were made. Time counts between steps; a sleep freezes the clock from the step before it to the step after the wake.
    A waiting request takes a place the moment it is free, also between two steps.

    ``answer_ids`` returns the tokens of a prompt's reference answer, which is written with ``correct_probability``;
    without it, or if it returns None, responses are random ids below ``vocab_size``. A response ends with the first
    stop token of its request, unless it was cut at ``max_completion_length``.
    """

    def __init__(
        self,
        config: FakeConfig,
        *,
        slots: int,
        vocab_size: int,
        version: int = 0,
        answer_ids: AnswerIds | None = None,
    ) -> None:
        super().__init__(slots, version, context=2**63, vocabulary=vocab_size)
        self._config = config
        self._answer_ids = answer_ids
        self._waiting: deque[_Draft] = deque()  # arrived before the last step
        self._running: list[tuple[float, int, _Draft]] = []  # heap of (end, rollout id, draft)
        self._clock = 0.0
        self._origin: float | None = None  # when the clock was 0; None: the clock restarts at the next step
        self._uncounted = 0  # tokens tagged since the last step

    def _refusal(self, request: GenerationRequest) -> None:
        """None: it accepts any request."""

    def step(self, now: float) -> StepOutput:
        if self.asleep:
            return StepOutput()
        if not self._running and not self._waiting:
            self._clock, self._origin = 0.0, None  # idle
        if self._origin is None:
            self._origin = now - self._clock
        # A difference of two times, not a sum of steps, whose rounding would depend on the number of steps.
        self._clock = max(self._clock, now - self._origin)
        self._end_due()
        while self._queue:
            self._waiting.append(self._draft(self._queue.popleft()))
        self._start_waiting(self._clock)
        self._end_due()
        if not self._finished:
            self._stamp_running()
        tokens, self._uncounted = self._uncounted, 0
        return self._report(tokens, now + max(0.0, self._running[0][0] - self._clock) if self._running else None)

    def _end_due(self) -> None:
        """End the running responses whose latency has passed."""
        while self._running and self._running[0][0] <= self._clock + _CLOCK_TOLERANCE:
            end, _, draft = heapq.heappop(self._running)
            self._stamp(draft)
            self._finished.append(self._result(draft))
            self._start_waiting(end)

    def _stamp_running(self) -> None:
        for _, _, draft in self._running:
            self._stamp(draft)

    def _start_waiting(self, at: float) -> None:
        while self._waiting and len(self._running) < self.slots:
            draft = self._waiting.popleft()
            draft.start = at
            heapq.heappush(self._running, (at + draft.latency, draft.request.rollout_id, draft))

    def _stamp(self, draft: _Draft) -> None:
        """Tag the tokens that the response got until the clock's time."""
        new = draft.made_until(self._clock) - len(draft.versions)
        draft.versions.extend([self.version] * new)
        self._uncounted += new

    @staticmethod
    def _result(draft: _Draft) -> Rollout | GenerationFailure:
        rollout_id = draft.request.rollout_id
        if draft.fails:
            return GenerationFailure(rollout_id, "The fake engine failed this request (failure_probability).")
        return Rollout(
            rollout_id,
            draft.request.group_id,
            draft.request.prompt,
            response_ids=draft.response_ids,
            behavior_logprobs=draft.logprobs,
            policy_versions=np.asarray(draft.versions, np.int64),
            finish_reason=draft.reason,
        )

    def _draft(self, request: GenerationRequest) -> _Draft:
        config = self._config
        rng = np.random.default_rng(request.seed & 0xFFFFFFFFFFFFFFFF)
        fails = rng.random() < config.failure_probability
        in_tail = rng.random() < config.tail_probability
        factor = math.exp(config.latency_sigma * rng.standard_normal())
        ratio = config.latency_max_ratio if in_tail else min(factor, config.latency_max_ratio)
        response_ids, reason = self._response(request, rng)
        logprobs = -rng.exponential(1.0, len(response_ids)).astype(np.float32)
        return _Draft(request, response_ids, logprobs, reason, config.latency_median * ratio, fails)

    def _response(self, request: GenerationRequest, rng: np.random.Generator) -> tuple[IntArray, FinishReason]:
        """The whole response, then its stop token, cut at the longest completion."""
        config, sampling = self._config, request.sampling
        stop = np.asarray(sampling.stop_token_ids[:1], np.int64)
        sigma = config.length_sigma
        # The log-normal's mean, not its median, is length_mean.
        length = max(1, round(config.length_mean * math.exp(sigma * rng.standard_normal() - sigma**2 / 2)))
        answer = self._answer_ids(request) if self._answer_ids is not None else None
        if rng.random() < config.correct_probability and answer is not None:
            text = np.asarray(answer, np.int64)
        else:
            stops = sorted({token for token in sampling.stop_token_ids if token < self._vocabulary})
            text = rng.integers(0, self._vocabulary - len(stops), size=max(1, length - len(stop)))
            for token in stops:  # ids at or over a stop token move up by one, so that none is drawn
                text += text >= token
        whole = np.concatenate([text, stop])
        cut = whole[: sampling.max_completion_length]
        return cut, "stop" if len(stop) and len(cut) == len(whole) else "length"

    def _sampled(self) -> Iterator[tuple[int, IntArray]]:
        self._stamp_running()
        for _, rollout_id, draft in self._running:
            yield rollout_id, draft.response_ids[: len(draft.versions)]

    def _give_up(self, gone: set[int]) -> None:
        self._waiting = deque(draft for draft in self._waiting if draft.request.rollout_id not in gone)
        self._running = [entry for entry in self._running if entry[1] not in gone]
        heapq.heapify(self._running)

    def sleep(self, keep_weights: bool = True) -> None:
        self.asleep = True
        self._origin = None

    def wake(self) -> None:
        self.asleep = False

    def load_weights(self, version: int, weights: Mapping[str, torch.Tensor], cache: CacheMode) -> None:
        """Sets only the version: there are no weights."""
        self._stamp_running()
        self.version = version

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {}

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        return [np.zeros(max(0, len(text) - 1), np.float32) for text in token_ids]
