"""Signals while Ray starts and after it has stopped: the same effect as at any other time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.loop import FAKE, QUIET
from tests.processes import lives

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SECONDS = 60  # for each thing that is waited for


def in_rays_start(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until Ray's first process runs; returns all processes that ``process`` has started."""
    assert process.stdout is not None
    while "Starting Ray" not in (line := process.stdout.readline()):
        assert line, f"the run ended before Ray started: {process.communicate()}"
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        begun = psutil.Process(process.pid).children(recursive=True)
        if any("gcs_server" in child.name() for child in begun):
            return begun
        time.sleep(0.01)
    raise AssertionError(f"no gcs_server within {SECONDS} s")


@pytest.mark.thorough
def test_a_signal_while_ray_starts_ends_the_run_in_order(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["train", f"run_dir={run_dir}", *FAKE, *QUIET, "logging.progress=plain"]
    command = [sys.executable, "-m", "asyncrlhf", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    begun = in_rays_start(process)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM and said.splitlines()[-1] == "asyncrlhf: interrupted.", said
    assert json.loads((run_dir / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert not (run_dir / "error.txt").exists()
    assert "no step was trained" in " ".join(out.split()) and "Loading the model" not in out, out
    limit = time.monotonic() + SECONDS
    while left := [child for child in begun if lives(child.pid)]:
        assert time.monotonic() < limit, f"these outlive the run: {left}"
        time.sleep(0.05)


TWICE = """
import os, signal, sys
import ray
from asyncrlhf.cli.main import main

def start(**_):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    raise RuntimeError("Ray's start went on.")

ray.init = start
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.thorough
def test_a_second_signal_ends_rays_start_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWICE, f"run_dir={tmp_path}", *FAKE, *QUIET]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=2 * SECONDS)
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == "asyncrlhf: interrupted.", done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "interrupted"


AFTERWARDS = """
import os, signal
from asyncrlhf.cluster.own_ray import OwnRay
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
ray = OwnRay(1, 100 * 2**20)
os.kill(os.getpid(), signal.SIGTERM)
ray.stop()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.thorough
def test_ray_leaves_a_process_its_handlers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTERWARDS]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=2 * SECONDS)
    assert (done.returncode, done.stdout) == (0, "handled\nhandled\n"), done.stderr
