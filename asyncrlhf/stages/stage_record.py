"""A stage's run directory, its line on the terminal and its W&B run; on the main process of several alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrlhf.config.run_config import RunConfig, to_plain
from asyncrlhf.orchestrator.run import new_run_dir
from asyncrlhf.records.checkpoint import FOLDER
from asyncrlhf.records.recorder import ROLLOUTS_FOLDER, RecordMarker, RunRecorder
from asyncrlhf.records.summary import environment
from asyncrlhf.records.wandb_sink import WandbSink
from asyncrlhf.validation import check

MODEL_FOLDER = "model"
# Figures of a line that are shown, in this order.
SHOWN = ("loss", "heldout_loss", "accuracy", "heldout_accuracy", "mean_token_accuracy", "heldout_mean_token_accuracy")


def is_main() -> bool:
    """Whether this process writes; ``accelerate launch`` and ``torchrun`` number theirs."""
    return int(os.environ.get("RANK", "0")) == 0


def run_folder(config: RunConfig, stage: str) -> Path:
    """``run_dir``, or ``runs/<name>-<stage>/<time>``; raises ConfigError where several processes would choose each."""
    if config.run_dir:
        return Path(config.run_dir)
    check(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "run_dir is empty, and each of several processes would choose one of its own; give run_dir=FOLDER.",
    )
    return new_run_dir(f"{config.name}-{stage}")


class StageRecord:
    """Writes config.yaml, metrics.jsonl and summary.json as ``train`` does, and W&B's run. ``marker`` is that of a
    resumed run.

    Raises ConfigError for a folder that cannot be written or already holds a run.
    """

    def __init__(self, config: RunConfig, run_dir: Path, stage: str, marker: RecordMarker | None = None) -> None:
        self.run_dir = run_dir
        self.stage = stage
        self.exit_reason = "done"
        self._seed = config.seed
        self._started = time.monotonic()
        self._console = Console() if is_main() and config.logging.progress != "none" else None
        self._recorder: RunRecorder | None = None
        self._wandb: WandbSink | None = None
        self._step = 0
        if not is_main():
            return
        self._recorder = RunRecorder(run_dir, to_plain(config), config.logging, marker)
        self._wandb = WandbSink(run_dir, to_plain(config), config.logging)
        if self._wandb.note:
            self.message(self._wandb.note)
        self.message(f"Run directory: {run_dir}")

    def message(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def log(self, metrics: Mapping[str, Any], total: int) -> None:
        """One line of metrics.jsonl, which needs a ``step``; ``total`` steps are planned."""
        self._step = int(metrics["step"])
        row = {**metrics, "wall_time": time.monotonic() - self._started}
        if self._recorder is not None:
            self._recorder.log_step(row)
        if self._wandb is not None:
            self._wandb.log(row)
        facts = ", ".join(f"{name.replace('_', ' ')} {row[name]:.3f}" for name in SHOWN if row.get(name) is not None)
        self.message(f"step {self._step}/{total}: {facts}")

    def marker(self) -> RecordMarker:
        """How far the records reach, for a checkpoint."""
        return self._recorder.checkpoint() if self._recorder is not None else RecordMarker()

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the summary and end W&B; returns the summary."""
        summary = {
            "run_dir": str(self.run_dir),
            "stage": self.stage,
            "exit_reason": self.exit_reason,
            "steps": self._step,
            "wall_seconds": time.monotonic() - self._started,
            "seed": self._seed,
            **facts,
            **environment("trl", "peft", "datasets"),
        }
        if self._recorder is not None:
            self._recorder.finish(summary)
            for name in (ROLLOUTS_FOLDER, FOLDER):  # made in any case, and empty in most
                with suppress(OSError):
                    (self.run_dir / name).rmdir()
        if self._wandb is not None:
            self._wandb.finish(summary, 0 if self.exit_reason == "done" else 1)
        return summary
