"""The live table of a sweep: one line per job, from its record and the last line of its metrics."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from asyncrlhf.records.recorder import METRICS_FILE
from asyncrlhf.records.summary import duration
from asyncrlhf.sweeps.record import JobRecord, SweepRecord

TAIL_BYTES = 16384  # of a metrics file: more than its last line
SHOWN_JOBS = 24  # lines on a terminal; finished jobs are left out first
_ORDER = {"running": 0, "failed": 1, "interrupted": 2, "pending": 3, "done": 4}


class SweepTable:
    """A live table on a terminal; elsewhere one line per ended job."""

    def __init__(self, total: int, done: int, console: Console | None = None):
        self._console = console if console is not None else Console()
        self._total, self._done_before, self._began = total, done, time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.start()

    def show(self, record: SweepRecord) -> None:
        if self._live is not None:
            self._live.update(self._render(record))

    def ended(self, job: JobRecord) -> None:
        """Print one job's end, unless a table shows it."""
        if self._live is None:
            note = f": {job.note}" if job.note else ""
            self.message(f"{job.name}: {job.state} after {duration(job.seconds)}{note}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self, record: SweepRecord) -> RenderableType:
        jobs = list(record.jobs.values())
        ended = sum(job.state in ("done", "failed") for job in jobs)
        table = Table(title=f"{ended} of {self._total} jobs ended, ETA {self._eta(ended)}", title_justify="left")
        for heading in ("job", "state", "step", "reward", "staleness"):
            table.add_column(heading, justify="left" if heading in ("job", "state") else "right", overflow="fold")
        shown = sorted(jobs, key=lambda job: _ORDER[job.state])[:SHOWN_JOBS]
        for job in shown:
            latest = last_metrics(record.folder / job.folder) if job.folder else {}
            step = f"{latest['step']}/{job.config.get('steps', '?')}" if latest else ""
            table.add_row(
                job.name, job.state, step, _number(latest.get("reward_mean")), _number(latest.get("staleness_mean"))
            )
        if len(jobs) > len(shown):
            table.caption = f"{len(jobs) - len(shown)} more: {', '.join(_counts(jobs, shown))}"
        return table

    def _eta(self, ended: int) -> str:
        new = ended - self._done_before
        return "?" if new <= 0 else duration((time.monotonic() - self._began) / new * (self._total - ended))


def _counts(jobs: list[JobRecord], shown: list[JobRecord]) -> list[str]:
    hidden = [job.state for job in jobs if job not in shown]
    return [f"{hidden.count(state)} {state}" for state in dict.fromkeys(hidden)]


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""


def last_metrics(run_dir: Path) -> dict[str, Any]:
    """The newest complete line of a run's metrics; empty before the first."""
    try:
        with (run_dir / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().rpartition(b"\n")[0].splitlines()
        found = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}
