"""docs/slurm.sbatch against a stand-in that sends its signals: a warned job writes a checkpoint and is queued again."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from asyncrlhf.records.read.verify import verify
from tests.integration.slurm_stand_in import JOB, batch, install, steps
from tests.loop import FAKE, QUIET
from tests.processes import ray_files

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "slurm.sbatch"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("RAY_PORT", str(port))
    monkeypatch.setenv("ASYNCRLHF_VENV", sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.thorough
def test_a_warned_job_goes_back_into_the_queue_and_goes_on_there(site: Path) -> None:
    words = (*FAKE, *QUIET, "steps=12", "cluster=auto", "generator.threads=1")
    run_dir = site / f"runs/slurm-{JOB}"
    with ray_files():
        first = batch(SCRIPT, *words, warn_at=4)
        made = steps(run_dir)
        log = (site / "job.log").read_text()
        assert first == (138, True) and 4 <= made < 12, log
        assert f"step-{made:08d}" in {path.name for path in run_dir.glob("checkpoints/*")}, log
        second = batch(SCRIPT, *words, warn_at=10**9)
    assert second == (0, False) and steps(run_dir) == 12, (site / "job.log").read_text()
    assert len(json.loads((run_dir / "attempts.json").read_text())) == 2
    assert verify(run_dir) == []


@pytest.mark.thorough
def test_a_job_that_fails_or_is_stopped_by_hand_stays_out_of_the_queue(site: Path) -> None:
    run_dir = site / f"runs/slurm-{JOB}"
    run_dir.mkdir(parents=True)
    (run_dir / "stop").touch()
    with ray_files():
        assert batch(SCRIPT, *FAKE, *QUIET, "cluster=auto", warn_at=10**9) == (130, False)
        assert batch(SCRIPT, *FAKE, *QUIET, "learner.steps=9", warn_at=10**9) == (2, False)
