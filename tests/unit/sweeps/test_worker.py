"""The processes that run a sweep's jobs: none outlives its driver."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import time
from asyncrlhf.sweeps.worker import Worker

if __name__ == "__main__":
    print(Worker().process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_with_its_driver_however_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    """A second command would run the job again beside an orphan, in the same folder."""
    (tmp_path / "driver.py").write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, tmp_path / "driver.py"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    worker = psutil.Process(int(driver.stdout.readline()))
    driver.send_signal(number)
    driver.wait(30)
    _, alive = psutil.wait_procs([worker], timeout=30)
    assert not alive or alive[0].status() == psutil.STATUS_ZOMBIE, "the worker outlived its driver by 30 s"
