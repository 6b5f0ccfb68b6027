"""A node of the cluster is lost with the learner or a reward worker on it: Ray takes half a minute to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["learner", "reward"])
def test_what_sat_on_a_lost_node_starts_on_another_and_the_run_ends_whole(tmp_path: Path, part: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.lost_node_process", str(tmp_path), part],
        cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert report["reason"] == "done" and report["steps"] == 14
    assert report["ledger"]["adds_up"] and report["ledger"]["trained"] == 14 * 16
    assert (report["ledger"]["dropped"].get("rolled_back", 0) > 0) == (part == "learner")
