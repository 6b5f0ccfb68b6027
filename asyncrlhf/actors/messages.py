"""The messages between the controller and the actors: metadata and object references, never token arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrlhf.types import FloatArray, GenerationFailure, GenerationRequest, Payload, Prompt, RolloutInfo


@dataclass(frozen=True)
class WorkItem:
    """One request with the prompt it belongs to."""

    request: GenerationRequest
    prompt: Prompt


@dataclass(frozen=True)
class Collected:
    """What a generator finished since the last look; ``busy_seconds`` and ``tokens`` are running totals."""

    finished: list[RolloutInfo] = field(default_factory=list)
    failed: list[GenerationFailure] = field(default_factory=list)
    busy_seconds: float = 0.0
    tokens: int = 0


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
