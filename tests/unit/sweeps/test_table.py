"""The table of a sweep: what a terminal shows while jobs run, and what a log gets as they end."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

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
    table.show(record)
    table.stop()
    seen = shown.getvalue()
    assert "1 of 3 jobs ended" in seen and "2/40" in seen and "0.500" in seen and "1.500" in seen
    assert all(state in seen for state in ("failed", "running", "pending"))
    SweepTable(3, 0, Console(file=log, width=120)).ended(first)
    assert log.getvalue().startswith("seed=0: failed after 3") and "no such luck" in log.getvalue()
