"""What a generator replica has finished and the controller has not collected yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrlhf.actors.messages import Collected, RolloutBundle
from asyncrlhf.readahead.owners import Chunk, ChunkInfo
from asyncrlhf.types import GenerationFailure, Payload, Rollout, RolloutInfo


class Outbox:
    """The engine's thread fills it and another may empty it; ``changed`` is notified when something was put in.

    Answers to requests with negative ids are private (an evaluation's, a probe's): :meth:`take_private` alone gives
    them.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._rollouts: list[Rollout] = []
        self._failures: list[GenerationFailure] = []
        self._chunks: list[Chunk] = []
        self._ended: dict[int, float] = {}  # when each rollout got its last token
        self._private: dict[int, Rollout | GenerationFailure] = {}

    @property
    def has_results(self) -> bool:
        return bool(self._rollouts or self._failures)

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def put(self, results: Sequence[Rollout | GenerationFailure], now: float) -> None:
        """``results`` ended at the clock time ``now``."""
        with self.changed:
            for result in results:
                if result.rollout_id < 0:
                    self._private[result.rollout_id] = result
                elif isinstance(result, GenerationFailure):
                    self._failures.append(result)
                else:
                    self._rollouts.append(result)
                    self._ended[result.rollout_id] = now
            if results:
                self.changed.notify_all()

    def put_chunks(self, chunks: Sequence[Chunk]) -> None:
        with self.changed:
            self._chunks += chunks
            if chunks:
                self.changed.notify_all()

    def withdraw(self, rollout_ids: Sequence[int]) -> list[int]:
        """Take out what is not wanted any more; returns the ids of the results among it."""
        wanted = set(rollout_ids)
        with self.changed:
            found = [r.rollout_id for r in self._rollouts if r.rollout_id in wanted]
            found += [f.rollout_id for f in self._failures if f.rollout_id in wanted]
            self._rollouts = [r for r in self._rollouts if r.rollout_id not in wanted]
            self._failures = [f for f in self._failures if f.rollout_id not in wanted]
            self._chunks = [c for c in self._chunks if c.rollout_id not in wanted]
        return found

    def take(self, busy_seconds: float, tokens: int, now: float) -> tuple[Collected, RolloutBundle, list[Chunk]]:
        """All but the private answers: the facts, and what their payloads point into once :func:`located` says where it
        lies."""
        with self.changed:
            rollouts, self._rollouts = self._rollouts, []
            failures, self._failures = self._failures, []
            chunks, self._chunks = self._chunks, []
            ended, self._ended = self._ended, {}
        ages = [now - ended[r.rollout_id] for r in rollouts]
        infos = [ChunkInfo(c.rollout_id, c.start, len(c.token_ids), Payload(None, i)) for i, c in enumerate(chunks)]
        facts = Collected(describe(rollouts), failures, busy_seconds, tokens, ages, infos)
        return facts, RolloutBundle(rollouts), chunks

    def take_private(self, rollout_ids: Sequence[int]) -> list[Rollout] | None:
        """The rollouts once none is under way, without those that could not be sampled; else None."""
        with self.changed:
            if not all(i in self._private for i in rollout_ids):
                return None
            results = [self._private.pop(i) for i in rollout_ids]
        return [r for r in results if isinstance(r, Rollout)]


def describe(rollouts: Sequence[Rollout]) -> list[RolloutInfo]:
    """The facts that the controller keeps; :func:`located` sets the payload and the time."""
    return [
        RolloutInfo(
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            generator_id=r.generator_id,
            prompt_length=len(r.prompt.token_ids),
            response_length=len(r.response_ids),
            min_version=int(r.policy_versions.min(initial=np.iinfo(np.int64).max)),
            max_version=int(r.policy_versions.max(initial=0)),
            finish_reason=r.finish_reason,
            generated_at=0.0,
            payload=Payload(None, i),
        )
        for i, r in enumerate(rollouts)
    ]


def located(facts: Collected, rollouts: Any, chunks: Any, now: float) -> Collected:
    """``facts`` with the references behind which the rollouts and chunks lie, by the caller's clock ``now``."""
    finished = [
        replace(info, payload=Payload(rollouts, info.payload.index), generated_at=now - age)
        for info, age in zip(facts.finished, facts.ages, strict=True)
    ]
    begun = [replace(info, payload=Payload(chunks, info.payload.index)) for info in facts.chunks]
    return replace(facts, finished=finished, chunks=begun)
