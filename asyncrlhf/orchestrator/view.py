"""What a run shows: the terminal's progress and the curves in W&B, behind one small object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.orchestrator.progress import Progress
from asyncrlhf.orchestrator.wandb_sink import WandbSink


class RunView:
    def __init__(self, progress: Progress, wandb: WandbSink) -> None:
        self._progress = progress
        self._wandb = wandb
        if wandb.note:
            progress.message(wandb.note)

    def begin(self) -> None:
        """The parts stand, the first step is near."""
        self._progress.begin()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._progress.update(metrics)
        self._wandb.log(metrics)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def stop(self) -> None:
        self._progress.stop()
