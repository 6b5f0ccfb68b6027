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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 3}', "\x00"])
def test_files_that_no_run_wrote_are_no_status(text: str, tmp_path: Path) -> None:
    for name in ("status.json", "summary.json"):
        (tmp_path / name).write_text(text)
    if text.startswith("{"):
        (tmp_path / "summary.json").unlink()
    assert list(status_lines(tmp_path, 0.0)) == [f"{tmp_path}: its process ended without a summary."]
