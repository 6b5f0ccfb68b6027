"""Ray drains a node of the cluster during a run: what sits there leaves in order, and the run goes on, or ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def drained(folder: Path, part: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.drain_process", str(folder), part],
        cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return report


@pytest.mark.more
def test_a_replica_leaves_a_drained_node_without_a_death_on_its_account(tmp_path: Path) -> None:
    report = drained(tmp_path, "generator")
    assert report["reason"] == "done" and report["steps"] == 16
    assert report["to"] != report["from"] and report["restarts"] == 0


@pytest.mark.more
def test_a_drained_learner_writes_a_checkpoint_out_of_turn(tmp_path: Path) -> None:
    report = drained(tmp_path, "learner")
    assert report["reason"] == "done" and report["steps"] == 16 and report["checkpoints"] == [5], report


@pytest.mark.more
def test_a_run_whose_driver_is_drained_ends_with_a_checkpoint(tmp_path: Path) -> None:
    report = drained(tmp_path, "driver")
    assert report["reason"] == "interrupted" and report["checkpoints"] == [report["steps"]], report
