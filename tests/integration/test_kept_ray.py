"""The jobs of a sweep that have the machine alone: those of one size share a Ray, and none is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_jobs_of_one_size_share_a_ray_and_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.kept_ray_process", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240)
    assert done.returncode == 0, "\n".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))
    jobs, left = json.loads((tmp_path / "seen.json").read_text())
    rays = {job["job"]: job["address"] for job in jobs}
    assert {job["job"]: job["state"] for job in jobs} == dict.fromkeys(rays, "done") | {"broken": "failed"}
    assert rays["first"] == rays["second"] != "", "a second Ray was started for a job of the same size"
    assert rays["broken"] == "", "the Ray of a job that failed was kept"
    assert rays["local"] == "", "a Ray ran beside a job that does not use it"
    assert all(job["actors"] == [] for job in jobs), "actors outlived their job"
    cores = [len(os.sched_getaffinity(0))]
    assert all(job["cores"] in ([], cores) for job in jobs), "the next job would load its model on fewer cores"
    assert left == []
