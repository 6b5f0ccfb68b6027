"""The table of a sweep: what a terminal shows while jobs run, and what a log gets as they end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from asyncrlhf.records.show.summary import duration
from asyncrlhf.sweeps import table as table_module
from asyncrlhf.sweeps.plan import plan_sweep
from asyncrlhf.sweeps.record import SweepRecord
from asyncrlhf.sweeps.table import SweepTable


def test_a_terminal_sees_each_job_and_a_log_a_line_as_one_ends(tmp_path: Path) -> None:
    record = SweepRecord(tmp_path, plan_sweep(["seeds=3", "steps=40"]))
    first, second, _ = record.jobs.values()
    record.begin(first)
    record.end(first, "failed", 3.0, "no such luck")
    record.begin(second)
    (tmp_path / second.folder).mkdir(parents=True)
    lines = [json.dumps({"step": s, "reward_mean": 0.25 * s, "staleness_mean": 1.5}) for s in (1, 2)]
    (tmp_path / second.folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "rew')  # being written
    shown, log = io.StringIO(), io.StringIO()
    table = SweepTable(3, 0, Console(file=shown, force_terminal=True, width=120))
    table.ended(first)
    table.show(record)
    table.stop()
    seen = shown.getvalue()
    assert "1 of 3 jobs ended" in seen and "2/40" in seen and "0.500" in seen and "1.500" in seen
    assert all(state in seen for state in ("failed", "running", "pending"))
    SweepTable(3, 0, Console(file=log, width=120)).ended(first)
    assert log.getvalue().startswith("seed=0: failed after 3") and "no such luck" in log.getvalue()


def write_steps(folder: Path, last: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, last + 1)))


def test_the_time_left_is_known_from_the_first_step_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(table_module.time, "monotonic", lambda: now)
    record = SweepRecord(tmp_path, plan_sweep(["seeds=5", "steps=40"]))
    done, failed, resumed, fresh, _ = record.jobs.values()
    done.state, failed.state = "done", "failed"  # of an earlier command; the failed one runs again
    for job in (resumed, fresh):
        record.begin(job)
    write_steps(tmp_path / resumed.folder, 20)  # what it did before its checkpoint is no pace of this command
    shown = io.StringIO()
    table = SweepTable(5, 1, Console(file=shown, force_terminal=True, width=120))

    def seen() -> str:
        shown.truncate(0)
        table.show(record)
        table._live.refresh()  # type: ignore[union-attr]
        return shown.getvalue()

    assert "1 of 5 jobs ended, ETA ?" in seen()
    now += 60.0
    assert "ETA ?" in seen()
    write_steps(tmp_path / resumed.folder, 30)
    write_steps(tmp_path / fresh.folder, 20)
    # In 60 s three quarters of a job, and 4 - 3/4 - 1/2 are left.
    assert f"1 of 5 jobs ended, ETA {duration(60 / 0.75 * 2.75)}" in seen()
    now += 30.0
    record.end(resumed, "done", 90.0)
    table.ended(resumed)
    assert f"2 of 5 jobs ended, ETA {duration(90 / 1.0 * 2.5)}" in seen()
    table.stop()
