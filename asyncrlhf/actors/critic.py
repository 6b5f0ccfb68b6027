"""A critic worker: a copy of the learner's critic, which gives finished rollouts their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrlhf.actors.messages import RolloutBundle, bundled
from asyncrlhf.actors.where import Where, where
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.pretrained import load_policy
from asyncrlhf.learner.companions import ServedCritic
from asyncrlhf.learner.learner_config import CriticConfig
from asyncrlhf.transport.build_transport import build_receiver
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import Rollout, ServiceResult


@dataclass(frozen=True)
class CriticSpec:
    """Everything a critic worker needs to start on any machine. ``precision``: ``learner.mixed_precision``."""

    critic: CriticConfig
    model: ModelConfig
    precision: str
    runtime: str
    weights: WeightsConfig


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

    def value(self, rollouts: Sequence[Rollout], ticket: Ticket) -> tuple[list[ServiceResult], RolloutBundle]:
        """One result a rollout, in order; the payload of those that succeeded is an index into the bundle.

        Raises WeightSyncError when the version cannot be had: the learner that holds it is gone.
        """
        if self._critic.version != ticket.version:
            self._critic.load(ticket.version, self._receiver.receive(ticket))
        return bundled(rollouts, self._critic.answer(rollouts))


class CriticActor:
    """The Ray actor around one worker."""

    def __init__(self, spec: CriticSpec, name: str) -> None:
        torch.set_num_threads(spec.critic.threads)
        self._worker = CriticWorker(spec, name)

    def ready(self) -> bool:
        return True

    def where(self) -> Where:
        return where()

    def value(
        self, ticket: Ticket, indices: Sequence[tuple[int, int]], *bundles: Sequence[Rollout]
    ) -> tuple[list[ServiceResult], RolloutBundle]:
        """``indices``: (bundle, index) of each rollout; the bundles arrive resolved from the object store."""
        return self._worker.value([bundles[bundle][index] for bundle, index in indices], ticket)
