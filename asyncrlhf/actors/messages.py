"""The messages between the controller and the actors: metadata and object references, never token arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrlhf.learner.base import StepResult
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
class TrainReply:
    """A step's result; ``ticket`` offers the new weights when a snapshot was asked for, ``probe_logprobs`` what the
    learner says of the audit's probe texts at that version."""

    result: StepResult
    ticket: Any = None
    snapshot_seconds: float = 0.0
    probe_logprobs: list[FloatArray] | None = None
