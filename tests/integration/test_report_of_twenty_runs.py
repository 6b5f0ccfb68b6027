"""The report of twenty real runs: how long a browser needs to draw it, and its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[2]
SECONDS, BYTES = 10.0, 15_000_000
SMALL = (
    "runtime=local", "generator.engine=fake", "num_generations=4", "batch_size=32", "generator.slots=64", "steps=120",
    "task.heldout_size=32", "logging.wandb=disabled", "async=fixed_lag", "sweep.name=twenty",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_twenty_configurations_are_drawn_in_ten_seconds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrlhf", "sweep", *SMALL, "async.lag=range(0,10)", "algorithm=grpo,tis"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("runs/sweeps/*/sweep.json")
    assert [job["state"] for job in json.loads(file.read_text())["jobs"]] == ["done"] * 20
    page = file.parent / "report" / "index.html"
    took = []
    for _ in range(3):
        browser = Browser()
        try:
            began = time.monotonic()
            browser.open(page, 1400)
            browser.wait_for("document.body.dataset.drawn === 'yes'")
            took.append(time.monotonic() - began)
            empty = browser.evaluate("plots.filter(plot => !plot.querySelector('.scatterlayer path')).length")
            assert empty == 0 and browser.evaluate("page.series.length") == 20
            assert browser.errors == [] and browser.requests == []
        finally:
            browser.close()
    print(f"{page.stat().st_size / 1e6:.1f} MB, drawn in {', '.join(f'{t:.1f}' for t in took)} s")
    assert page.stat().st_size < BYTES
    assert min(took) < SECONDS, took
