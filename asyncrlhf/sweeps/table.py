"""The live table of a sweep: one line per job, from its record and the last line of its metrics."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from asyncrlhf.records.show.summary import duration
from asyncrlhf.records.write.recorder import METRICS_FILE
from asyncrlhf.sweeps.job import JobRecord
from asyncrlhf.sweeps.record import SweepRecord

TAIL_BYTES = 16384  # of a metrics file: more than its last line
SHOWN_JOBS = 24  # lines on a terminal; finished jobs are left out first
_ORDER = {"running": 0, "failed": 1, "interrupted": 2, "pending": 3, "done": 4}


class SweepTable:
    """A live table on a terminal; elsewhere one line per ended job."""

    def __init__(self, total: int, done: int, console: Console | None = None):
        self._console = console if console is not None else Console()
        self._total, self._done_before, self._began = total, done, time.monotonic()
        self._ended = 0  # jobs of this command; one that failed in an earlier command runs again
        self._at_first: dict[str, float] = {}  # by hash: the finished share of a job when it began, above 0 if resumed
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.start()

    def show(self, record: SweepRecord) -> None:
        if self._live is not None:
            self._live.update(self._render(record))

    def ended(self, job: JobRecord) -> None:
        """Count one job's end, and print it unless a table shows it."""
        self._ended += 1
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
        shown = sorted(jobs, key=lambda job: _ORDER[job.state])[:SHOWN_JOBS]
        read = [job for job in jobs if job.state == "running" or (job.folder and job in shown)]
        latest = {job.hash: last_metrics(record.folder / job.folder) for job in read}
        running = {job.hash: _share(latest[job.hash], job) for job in jobs if job.state == "running"}
        ended, left = self._done_before + self._ended, self._left(running)
        title = f"{ended} of {self._total} jobs ended, ETA {'?' if left is None else duration(left)}"
        table = Table(title=title, title_justify="left")
        for heading in ("job", "state", "step", "reward", "staleness"):
            table.add_column(heading, justify="left" if heading in ("job", "state") else "right", overflow="fold")
        for job in shown:
            last = latest.get(job.hash, {})
            step = f"{last['step']}/{job.config.get('steps', '?')}" if last else ""
            table.add_row(
                job.name, job.state, step, _number(last.get("reward_mean")), _number(last.get("staleness_mean"))
            )
        if len(jobs) > len(shown):
            table.caption = f"{len(jobs) - len(shown)} more: {', '.join(_counts(jobs, shown))}"
        return table

    def _left(self, running: Mapping[str, float]) -> float | None:
        """Seconds until all jobs have ended, at the pace of the shares finished since this command began; None before
        the first step. ``running``: the finished share of each job under way, by its hash."""
        for job, share in running.items():
            self._at_first.setdefault(job, share)
        finished = self._ended + sum(running.values()) - sum(self._at_first.values())
        left = self._total - self._done_before - self._ended - sum(running.values())
        return (time.monotonic() - self._began) / finished * left if finished > 0 else None


def _share(latest: Mapping[str, Any], job: JobRecord) -> float:
    """The finished share of a job's steps."""
    step, steps = latest.get("step", 0), job.config.get("steps")
    return min(1.0, step / steps) if isinstance(step, int) and isinstance(steps, int) and steps > 0 else 0.0


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
