"""A critic worker: a copy of the learner's critic, which gives finished rollouts their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrlhf.actors.annotator import ANSWER_SECONDS
from asyncrlhf.actors.messages import ArrayBundle, annotated
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_policy
from asyncrlhf.learner.companions import ServedCritic
from asyncrlhf.learner.learner_config import CriticConfig
from asyncrlhf.readahead.owners import Chunk, Prefilled
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import Annotation, Rollout


@dataclass(frozen=True)
class CriticSpec:
    """Everything a critic worker needs to start on any machine. ``precision``: ``learner.mixed_precision``."""

    critic: CriticConfig
    model: ModelConfig
    precision: str
    runtime: str
    weights: WeightsConfig
    answer_seconds: float = ANSWER_SECONDS

    kind: ClassVar[str] = "critic"

    @property
    def settings(self) -> CriticConfig:
        return self.critic

    def build(self, name: str) -> CriticWorker:
        return CriticWorker(self, name)


class CriticWorker:
    """Each call brings the ticket of the version that is to answer it, so that versions change between two calls and a
    worker that was started again lacks nothing."""

    def __init__(self, spec: CriticSpec, name: str) -> None:
        own = spec.critic
        device = "cuda" if own.gpus > 0 else "cpu"
        self._critic = ServedCritic(
            load_policy(spec.model, device, dtype=torch.float32),
            precision=spec.precision,
            token_budget=own.token_budget,
        )
        self._receiver = build_receiver(spec.weights.beside_the_policy(spec.runtime), spec.runtime, device)
        self._receiver.connect("", 1, 2, 0, name)

    def annotate(
        self, rollouts: Sequence[Rollout], ticket: Ticket | None = None
    ) -> tuple[list[Annotation], ArrayBundle]:
        """The values [L] of each rollout by the critic behind ``ticket``, or the reason why it has none.

        Raises WeightSyncError when the version cannot be had: the learner that holds it is gone.
        """
        assert ticket is not None, "a critic is asked by version"
        if self._critic.version != ticket.version:
            self._critic.load(ticket.version, self._receiver.receive(ticket))
        return annotated("values", rollouts, self._critic.answer(rollouts), ticket.version)

    def prefill(self, released: Sequence[int], chunks: Sequence[Chunk]) -> Prefilled:
        """Nothing is read ahead: the critic that will answer is not known before a rollout ends."""
        return Prefilled(False)
