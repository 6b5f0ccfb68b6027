"""The messages between the controller and the actors: metadata and object references, never token arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrlhf.rewards.chunked_messages import ChunkInfo
from asyncrlhf.types import FloatArray, GenerationFailure, GenerationRequest, Payload, Prompt, Rollout, RolloutInfo


@dataclass(frozen=True)
class WorkItem:
    """One request with the prompt it belongs to."""

    request: GenerationRequest
    prompt: Prompt


@dataclass(frozen=True)
class Collected:
    """What a generator finished since the last look, and the chunks of what it goes on with; ``busy_seconds`` and
    ``tokens`` are running totals, ``ages`` the seconds since the last token of each finished rollout."""

    finished: list[RolloutInfo] = field(default_factory=list)
    failed: list[GenerationFailure] = field(default_factory=list)
    busy_seconds: float = 0.0
    tokens: int = 0
    ages: list[float] = field(default_factory=list)
    chunks: list[ChunkInfo] = field(default_factory=list)


class RolloutBundle(Sequence[Rollout]):
    """Rollouts that travel between processes as a few flat arrays: one by one, small arrays cost more to carry than
    they hold, and siblings would each bring their prompt along."""

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self._rollouts = list(rollouts)

    def __len__(self) -> int:
        return len(self._rollouts)

    def __getitem__(self, index: Any) -> Any:
        return self._rollouts[index]

    def __reduce__(self) -> tuple[Any, ...]:
        prompts = list({id(r.prompt): r.prompt for r in self._rollouts}.values())
        places = {id(prompt): place for place, prompt in enumerate(prompts)}
        facts = [
            (r.rollout_id, r.group_id, places[id(r.prompt)], r.finish_reason, r.response_text, r.generator_id)
            for r in self._rollouts
        ]
        lengths = [len(r.response_ids) for r in self._rollouts]
        flat = tuple(
            np.concatenate([getattr(r, name) for r in self._rollouts]) if self._rollouts else np.empty(0, np.int64)
            for name in ("response_ids", "behavior_logprobs", "policy_versions")
        )
        refs = [r.ref_logprobs for r in self._rollouts if r.ref_logprobs is not None]
        referenced = [r.ref_logprobs is not None for r in self._rollouts] if refs else None
        return _unpack, (prompts, facts, lengths, flat, referenced, np.concatenate(refs) if refs else None)


def _unpack(
    prompts: list[Prompt],
    facts: list[Any],
    lengths: list[int],
    flat: tuple[Any, Any, Any],
    referenced: list[bool] | None,
    refs: Any,
) -> RolloutBundle:
    """``referenced``: whose log-probs of the reference ``refs`` holds, one behind the other; None for nobody's."""
    rollouts, start, ref_start = [], 0, 0
    for i, ((rollout_id, group_id, place, finish, text, generator), length) in enumerate(
        zip(facts, lengths, strict=True)
    ):
        ids, logprobs, versions = (array[start : start + length] for array in flat)
        start += length
        ref = None
        if referenced is not None and referenced[i]:
            ref = refs[ref_start : ref_start + length]
            ref_start += length
        prompt = prompts[place]
        rollouts.append(
            Rollout(rollout_id, group_id, prompt, ids, logprobs, versions, finish, text, generator, ref_logprobs=ref)
        )
    return RolloutBundle(rollouts)


@dataclass(frozen=True)
class TrainItem:
    """One rollout of a batch, by reference."""

    payload: Payload
    reward: float
    weight: float = 1.0
    masked_before_version: int = 0


@dataclass(frozen=True)
class Offer:
    """A snapshot under way, to be published: the seconds that the learner stood still for snapshots since the offer
    before, and what it says of the audit's probe texts at that version (None when no audit is due)."""

    seconds: float
    probe_logprobs: list[FloatArray] | None = None
