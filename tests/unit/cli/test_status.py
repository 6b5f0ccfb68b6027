"""``asyncrlhf status`` of runs on this machine and on others, and of files that no run wrote."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.cli.status import status_lines

FIGURES = {
    "step": 3, "steps": 9, "published_version": 3, "buffer": 4, "in_flight": 8, "waiting_to_be_issued_again": 0,
    "seconds_without_movement": 1.0, "restarts": {}, "waits": [], "doing": "trains", "pid": 42,
}  # fmt: skip


def first_line(folder: Path, now: float, **status: Any) -> str:
    (folder / "status.json").write_text(json.dumps(FIGURES | status))
    return next(iter(status_lines(folder, now)))


@pytest.mark.parametrize(
    ("host", "ago", "said"),
    [
        (socket.gethostname(), 1, "process 42 on .* is gone, without a summary: it was killed"),
        ("another", 1, "process 42 on another trains"),  # no lock is seen from here, and it has just written
        ("another", 60, "process 42 on another is gone, without a summary: it was killed"),
    ],
)
def test_a_run_without_a_lock_lives_if_another_machine_writes(tmp_path: Path, host: str, ago: float, said: str) -> None:
    assert re.search(said, first_line(tmp_path, 1000.0 + ago, host=host, written=1000.0, answered=1000.0))


def test_a_finished_run_says_why_its_parts_died(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": "finished", "steps": 9, "steps_planned": 9}))
    lines = [
        {"n": 0, "event": "died", "replica": "generator-3", "reason": "It was killed."},
        {"n": 1, "event": "dropped", "ids": [3], "reason": '"event":"died"'},
        {"n": 2, "event": "died", "replica": "reward-0", "reason": "Out of memory."},
        {"n": 3, "event": "died", "replica": "generator-3", "reason": "It was frozen."},
    ]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (tmp_path / "journal.jsonl").write_text(text + '{"n":4,"event":"died"}\n{"n":5,"event":"died","rep')
    assert list(status_lines(tmp_path, 0.0))[1:] == [
        "generator-3 died 2 times, the last time: It was frozen.",
        "reward-0 died once: Out of memory.",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 3}', "\x00"])
def test_files_that_no_run_wrote_are_no_status(text: str, tmp_path: Path) -> None:
    for name in ("status.json", "summary.json"):
        (tmp_path / name).write_text(text)
    if text.startswith("{"):
        (tmp_path / "summary.json").unlink()
    assert list(status_lines(tmp_path, 0.0)) == [f"{tmp_path}: its process ended without a summary."]
