"""TensorBoard: event files under ``run_dir/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.records.show.metric_names import titled
from asyncrlhf.records.show.sinks import RunFacts


class TensorboardSink:
    """``tensorboard --logdir runs`` shows each metric under its section, over learner steps. A resumed run hides the
    lines that the first one wrote after its checkpoint."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.start_step + 1 if run.start_step else None
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge)

    def log(self, metrics: Mapping[str, Any]) -> None:
        step = int(metrics["step"])
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(titled(name), float(value), step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.add_text("summary/exit_reason", str(summary.get("exit_reason", "")))
            self._writer.close()
