"""The processes that run a sweep's jobs: none outlives its driver."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from asyncrlhf.sweeps.worker import MOST_TEMPDIR

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import time
from asyncrlhf.sweeps.worker import Worker

if __name__ == "__main__":
    workers = [Worker(forks={forks}) for _ in range(2)]
    print(*(worker.process.pid for worker in workers), flush=True)
    time.sleep(600)
"""


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize(("number", "forks"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_a_worker_ends_with_its_driver_however_that_ends(tmp_path: Path, number: signal.Signals, forks: bool) -> None:
    """A second command would run the job again beside an orphan, in the same folder."""
    (tmp_path / "driver.py").write_text(DRIVER.format(forks=forks))
    driver = subprocess.Popen(
        [sys.executable, tmp_path / "driver.py"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    if forks:
        servers = {worker.ppid() for worker in workers}
        assert len(servers) == 1 and driver.pid not in servers, "a fork of a process with threads may hang"
        for worker in workers:
            assert any("libtorch" in part.path for part in worker.memory_maps()), "it would import torch itself"
        workers += map(psutil.Process, servers)
    driver.send_signal(number)
    driver.wait(30)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in alive), "a process outlived its driver by 30 s"


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("over", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_workers_start_also_where_the_folder_for_temporary_files_has_a_long_path(tmp_path: Path, over: int) -> None:
    """With the longest path that the socket of their server bears, and without the server beyond it."""
    (tmp_path / "driver.py").write_text(DRIVER.format(forks=True))
    with tempfile.TemporaryDirectory(prefix="long-", dir="/tmp") as base:
        long = Path(base) / ("x" * (MOST_TEMPDIR + over - len(base) - 1))
        long.mkdir()
        assert len(str(long)) == MOST_TEMPDIR + over
        driver = subprocess.Popen(
            [sys.executable, tmp_path / "driver.py"],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "TMPDIR": str(long)},
            stdout=subprocess.PIPE,
        )
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        parents = {worker.ppid() for worker in workers}
        driver.terminate()
        driver.wait(30)
        psutil.wait_procs(workers, timeout=30)
    assert len(workers) == 2 and (parents == {driver.pid}) == bool(over)
