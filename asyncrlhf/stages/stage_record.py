"""A stage's run directory, terminal and sinks, in the main process only, and its end by Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.checkpoint_manifest import check_manifest, read_json, write_manifest
from asyncrlhf.last_words import ENDING, seen
from asyncrlhf.orchestrator.run import new_run_dir
from asyncrlhf.orchestrator.start.interruption import asked_to_stop
from asyncrlhf.records.show.sinks import Sinks, check_sinks
from asyncrlhf.records.show.summary import environment
from asyncrlhf.records.write.checkpoint import FOLDER
from asyncrlhf.records.write.record_marker import RecordMarker, check_records
from asyncrlhf.records.write.recorder import METRICS_FILE, ROLLOUTS_FOLDER, RunRecorder, read_metrics
from asyncrlhf.redaction import redact, redacted
from asyncrlhf.validation import check

MODEL_FOLDER = "model"
MARKER_FILE = "records.json"
# Keys of TRL's logs that do not describe the model: durations of the library's evaluation, and totals of the run.
LEFT_OUT = ("_runtime", "_per_second", "total_flos", "train_loss", "num_tokens", "num_input_tokens_seen")
# Figures of a line to show, in this order.
SHOWN = ("loss", "heldout_loss", "accuracy", "heldout_accuracy", "mean_token_accuracy", "heldout_mean_token_accuracy")


def is_main() -> bool:
    """Whether this process writes; ``accelerate launch`` and ``torchrun`` number their processes."""
    return int(os.environ.get("RANK", "0")) == 0


def run_folder(config: RunConfig, stage: str) -> Path:
    """``run_dir``, or ``runs/<name>-<stage>/<time>``; raises ConfigError if several processes would each choose one."""
    if config.run_dir:
        return Path(config.run_dir)
    check(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "run_dir is empty, and each of several processes would choose one of its own; give run_dir=FOLDER.",
    )
    return new_run_dir(f"{config.name}-{stage}")


def read_marker(folder: Path) -> RecordMarker:
    """The records' marker of a checkpoint; raises CheckpointError if there is none."""
    return RecordMarker.of(read_json(folder / MARKER_FILE), folder / MARKER_FILE)


def whole(folder: Path, run_dir: Path) -> Path:
    """The checkpoint ``folder``; raises CheckpointError if it is damaged, or ``run_dir`` lacks its records."""
    check_manifest(folder)
    check_records(run_dir, read_marker(folder))
    return folder


class StageRecord(TrainerCallback):
    """Writes config.yaml, metrics.jsonl and summary.json as ``train`` does, and feeds the sinks, from TRL's logs;
    stores the records' marker with each checkpoint. ``marker`` is that of a resumed run.

    Raises ConfigError for a folder that cannot be written or already holds a run.
    """

    def __init__(self, config: RunConfig, run_dir: Path, stage: str, marker: RecordMarker | None = None) -> None:
        self.run_dir = run_dir
        self.stage = stage
        self.exit_reason = "done"
        self.interrupted = False
        self._seed = config.seed
        self._started = time.monotonic()
        self._console = Console() if is_main() and config.logging.progress != "none" else None
        self._recorder: RunRecorder | None = None
        self._sinks: Sinks | None = None
        self._step = 0
        if not is_main():
            return
        check_sinks(config.logging)
        self._recorder = RunRecorder(run_dir, to_plain(config), config.logging, marker)
        start = int(read_metrics(run_dir / METRICS_FILE)[-1]["step"]) if marker and marker.metrics_lines else 0
        self._sinks = Sinks(run_dir, to_plain(config), config.logging, stage, start)
        self._sinks.tell(self.message)
        self.message(f"Run directory: {run_dir}")

    def message(self, text: str) -> None:
        if self._console is not None:
            self._console.print(redact(text), markup=False, highlight=False, soft_wrap=True)

    def log(self, metrics: Mapping[str, Any], total: int) -> None:
        """One line of metrics.jsonl, which needs a ``step``; ``total`` steps are planned."""
        self._step = int(metrics["step"])
        row = {**metrics, "wall_time": time.monotonic() - self._started}
        if self._recorder is not None:
            self._recorder.log_step(row)
        if self._sinks is not None:
            self._sinks.log(row)
        facts = ", ".join(f"{name.replace('_', ' ')} {row[name]:.3f}" for name in SHOWN if row.get(name) is not None)
        self.message(f"step {self._step}/{total}: {facts}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        known = {name: value for name, value in (logs or {}).items() if not name.endswith(LEFT_OUT)}
        row = {re.sub("^eval_", "heldout_", name): value for name, value in known.items()}
        if set(row) - {"epoch"}:
            self.log({"step": state.global_step, **row}, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.interrupted or (not torch.distributed.is_initialized() and asked_to_stop(self.run_dir)):
            self.interrupted = True
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # the other processes' files are there
        if self._recorder is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / MARKER_FILE).write_text(json.dumps(asdict(self._recorder.checkpoint())) + "\n")
            write_manifest(folder, {})

    @contextmanager
    def stopped_in_order(self) -> Iterator[None]:
        """In this context the first signal (Ctrl-C) ends the run after the present step, with a checkpoint, a second
        one at once. A signal that the process was started to ignore stays ignored."""
        before = {number: signal.getsignal(number) for number in ENDING}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def first(number: int, _: Any) -> None:
            if seen(number):
                self.interrupted = True
                restore()
                self.message("Finishing the step under way and writing a checkpoint; Ctrl-C again ends at once.")

        for number in before:
            signal.signal(number, first)
        try:
            yield
        finally:
            restore()

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the summary and end the sinks; returns the summary."""
        summary: dict[str, Any] = redacted(
            {
                "run_dir": str(self.run_dir),
                "stage": self.stage,
                "exit_reason": self.exit_reason,
                "steps": self._step,
                "wall_seconds": time.monotonic() - self._started,
                "seed": self._seed,
                **facts,
                **environment("trl", "peft", "datasets"),
            }
        )
        if self._recorder is not None:
            self._recorder.finish(summary)
            for name in (ROLLOUTS_FOLDER, FOLDER):  # always created, and usually empty
                with suppress(OSError):
                    (self.run_dir / name).rmdir()
        if self._sinks is not None and self._recorder is not None and (said := self._sinks.finish(summary)):
            summary["sinks"] = redacted(said)
            self._recorder.finish(summary)
        return summary
