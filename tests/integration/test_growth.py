"""A Ray cluster that gains a node in the middle of a run: a replica joins; when the node dies, the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180


@pytest.mark.thorough
def test_a_replica_joins_with_a_node_and_is_lost_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.growth_process", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    said = " ".join(done.stdout.split())
    assert "generator-1 joined at version" in said and "generator-1 is not started again" in said
    assert report["steps"] == 24 and report["staleness"] <= 2
    consumed = report["versions"]["generator-1"]
    assert len(consumed) >= 16 and min(consumed) >= 4, "the new replica took part, and not before it came"
    assert max(consumed) <= 12 + 3, "what it finished before its node died was trained within the bound"
    assert max(report["versions"]["generator-0"]) == 23
