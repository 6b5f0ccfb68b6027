"""The shipped sweep ``staleness_quick``, whole: its time, its report, and its sentence from the raw records."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 12 * 60.0  # seconds for the whole sweep on two cores
BESIDE = 10.0  # seconds of a job beside its training
METHOD, OTHER = "decoupled_grpo", "grpo_mu"


class Watch(threading.Thread):
    """Notes when each job's steps end, on a real clock: that of ``runtime=local`` is virtual, and a job's seconds
    contain its start. ``seen``: by job, the times and the numbers of the first and the newest step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.done = folder, threading.Event()
        self.seen: dict[str, tuple[float, int, float, int]] = {}

    def run(self) -> None:
        while not self.done.wait(0.1):
            for file in self.folder.glob("runs/sweeps/*/jobs/*/metrics.jsonl"):
                now, steps = time.monotonic(), file.read_bytes().count(b"\n")
                first, at_first, _, before = self.seen.get(file.parent.name, (now, steps, now, 0))
                if steps > before:
                    self.seen[file.parent.name] = (first, at_first, now, steps)

    def training(self, job: str) -> float:
        """Seconds of all steps, at the pace of those after the first that was seen."""
        first, at_first, last, steps = self.seen[job]
        return (last - first) * steps / (steps - at_first)


def accuracy(run: Path) -> float:
    """Held-out accuracy after training, from the answers."""
    answers = pd.concat(pd.read_parquet(part) for part in (run / "evaluations").glob("*.parquet"))
    last = answers[(answers.step == answers.step.max()) & (answers.set == "")]
    return float((last.response.str.strip() == last.answer).mean())


def staleness(run: Path) -> float:
    """Versions between a rollout's oldest token and its training, mean over the steps."""
    rows = pd.concat(pd.read_parquet(part) for part in (run / "rollouts").glob("*.parquet"))
    rows = rows[rows.state == "trained"]
    at = rows.consumed_at_version.map(lambda versions: versions[-1])
    age = at - rows.policy_versions.map(min)
    return float(age.groupby(at).mean().mean())


def seconds(run: Path) -> float:
    return float(pd.read_json(run / "metrics.jsonl", lines=True).wall_time.iloc[-1])


def kept(own: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """A share and its standard error, by the delta method: both variances and their covariance."""
    ratio = own.mean() / base.mean()
    (own_var, both), (_, base_var) = np.cov(own, base) / len(own)
    return ratio, np.sqrt(own_var - 2 * ratio * both + ratio**2 * base_var) / base.mean()


def share(own: np.ndarray, base: np.ndarray) -> str:
    ratio, error = kept(own, base)
    if 1 - ratio > 2 * error:
        return f"loses {100 * (1 - ratio):.0f} ± {100 * error:.0f}%"
    return f"keeps {100 * ratio:.0f} ± {100 * error:.0f}%"


def headline(folder: Path, jobs: list[dict[str, Any]]) -> str:
    quality: dict[tuple[str, int], np.ndarray] = {}
    ages: dict[int, float] = {}
    runs = {job["name"]: folder / job["folder"] for job in jobs}
    for lag in (0, 4, 16):
        for method in (METHOD, OTHER):
            own = [runs[f"quality,lag={lag},algorithm={method},seed={seed}"] for seed in (0, 1, 2)]
            quality[method, lag] = np.array([accuracy(run) for run in own])
            if method == METHOD:
                ages[lag] = float(np.mean([staleness(run) for run in own]))
    times = {
        mode: np.array([seconds(runs[f"speed,async={mode},seed={s}"]) for s in (0, 1)]) for mode in ("sync", "fill")
    }
    speed = times["sync"] / times["fill"]
    near, far, bare = (
        share(quality[method, lag], quality[method, 0]) for method, lag in ((METHOD, 4), (METHOD, 16), (OTHER, 16))
    )
    return (
        f"lag 4 (staleness {ages[4]:.1f}) with {METHOD} {near} of the held-out accuracy at {speed.mean():.2f} ± "
        f"{speed.std(ddof=1) / 2**0.5:.2f} times the speed of sync; at lag 16 (staleness {ages[16]:.1f}) it {far}, "
        f"where {OTHER} {bare} (quality: 3 seeds; speed: async at that bound, 2 alternated pairs, each alone on the "
        "machine)."
    )


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_quick_sweep_ends_in_time_with_the_sentence_of_its_raw_records(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.start()
    began = time.monotonic()
    command = [sys.executable, "-m", "asyncrlhf", "sweep", "experiment=staleness_quick"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=2 * LIMIT)
    took = time.monotonic() - began
    watch.done.set()
    watch.join()
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("runs/sweeps/*/sweep.json")
    folder, jobs = file.parent, json.loads(file.read_text())["jobs"]
    assert len(jobs) == 22 and {job["state"] for job in jobs} == {"done"}
    beside = {job["name"]: job["seconds"] - watch.training(Path(job["folder"]).name) for job in jobs}
    print(f"{took:.0f} s; beside training: { ({name: round(value, 1) for name, value in beside.items()}) }")

    said = headline(folder, jobs)
    assert said in done.stdout.splitlines(), (said, done.stdout)
    assert json.loads((folder / "results.json").read_text())["sentences"][0] == said
    page = html.unescape((folder / "report" / "index.html").read_text())
    assert said in page
    for title in ("Quality against staleness", "Quality against wall-clock", "Held-out accuracy", "Reward"):
        assert title in page

    assert took < LIMIT, f"{took:.0f} s"
    assert max(beside.values()) < BESIDE, beside
