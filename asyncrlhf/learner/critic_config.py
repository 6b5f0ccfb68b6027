"""Settings of who computes the critic's old values: ``critic.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.learner.workers_config import WorkersConfig


@dataclass(frozen=True)
class CriticConfig(WorkersConfig):
    """``where=learner``: the learner's critic passes over the batch before a step's first update. ``where=service``:
    workers with a copy of it give each rollout its values as it ends. The learner trains the critic either way."""

    def __post_init__(self) -> None:
        self.check("critic", "critic")
