"""``asyncrlhf sweep`` from end to end: jobs that fail, are killed or interrupted, and the same command again."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from asyncrlhf.sweeps.results import read_results
from asyncrlhf.sweeps.sentences import sentences

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "runtime=local", "generator.engine=fake", "num_generations=4", "batch_size=16", "generator.slots=16", "steps=3",
    "task.heldout_size=8", "logging.wandb=disabled", "async=fixed_lag", "reward.kind=python",
)  # fmt: skip
REWARDS = """
import os, signal, time
from pathlib import Path
import psutil

SEEN = []

class Counted:
    # A sink: it counts the runs that its module has seen.

    def start(self, run):
        SEEN.append(run.run_dir)
        (run.run_dir / "seen").write_text(str(len(SEEN)))

    def log(self, metrics):
        pass

    def finish(self, summary):
        pass

HERE = Path.cwd()  # of the import; calls have a folder of their own

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def fails(completions, **columns):
    if not (HERE / "mended").exists():
        raise RuntimeError("no such luck")
    return length(completions)

def once(name, number):
    # Signal the job's own process, or the command above it, the first time.
    chain = [psutil.Process(), *psutil.Process().parents()]
    command = next(i for i, process in enumerate(chain) if "sweep" in process.cmdline())
    if not (HERE / name).exists():
        (HERE / name).touch()
        # The job's process is a fork of a server below the command.
        (chain[command] if number == signal.SIGINT else chain[command - 2]).send_signal(number)
        time.sleep(600)

def killed(completions, **columns):
    once("killed", signal.SIGKILL)
    return length(completions)

def interrupted(completions, **columns):
    once("interrupted", signal.SIGINT)
    return length(completions)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncrlhf", "sweep", *SMALL, *overrides]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def record(folder: Path) -> tuple[Path, dict[str, Any]]:
    (file,) = (folder / "runs" / "sweeps").glob("*/sweep.json")
    return file.parent, {job["name"]: job for job in json.loads(file.read_text())["jobs"]}


@pytest.mark.more
@pytest.mark.in_turn
def test_two_jobs_end_in_a_report_whose_sentence_is_that_of_the_raw_records(here: Path) -> None:
    counted = 'logging.sinks=["mine:Counted"]'
    done = sweep(here, "async.lag=0,2", "reward.target=mine:length", "seeds=2", "sweep.jobs=1", counted)
    assert done.returncode == 0, done.stdout + done.stderr
    folder, jobs = record(here)
    assert [job["state"] for job in jobs.values()] == ["done"] * 4
    quality, staleness = {}, {}
    for name, job in jobs.items():
        run = folder / job["folder"]
        assert (run / "seen").read_text() == "1", "a job begins with the user's modules as they were written"
        quality[name] = json.loads((run / "summary.json").read_text())["heldout_accuracy"]["after"]
        rollouts = pd.concat(pd.read_parquet(part) for part in (run / "rollouts").glob("*.parquet"))
        trained = rollouts[rollouts.state == "trained"]
        oldest = [
            at[-1] - min(versions)
            for at, versions in zip(trained.consumed_at_version, trained.policy_versions, strict=True)
        ]
        staleness[name] = statistics.fmean(oldest)
    base = statistics.fmean(quality[f"lag=0,seed={s}"] for s in (0, 1))
    kept = statistics.fmean(quality[f"lag=2,seed={s}"] for s in (0, 1)) / base
    left = [(quality[f"lag=2,seed={s}"] - kept * quality[f"lag=0,seed={s}"]) / base for s in (0, 1)]
    results = read_results(folder)
    assert {p.name: pytest.approx(p.staleness) for c in results.cells for p in c.points} == staleness
    wanted = f"the run keeps {100 * kept:.0f} ± {100 * statistics.stdev(left) / 2**0.5:.0f}%"
    assert any(wanted in sentence for sentence in sentences(results)), (wanted, sentences(results))
    assert "No speed is reported" in done.stdout
    assert json.loads((folder / "results.json").read_text())["sentences"] == sentences(results)
    page = (folder / "report" / "index.html").read_text()
    assert "Quality against staleness" in page and sentences(results)[0].split(":")[0] in page


@pytest.mark.thorough
def test_jobs_that_fail_die_or_are_interrupted_stop_no_other_and_alone_are_run_again(here: Path) -> None:
    choices = ("reward.target=mine:length,mine:fails,mine:killed,mine:interrupted", "seeds=1", "sweep.jobs=1")
    first = sweep(here, *choices)
    assert first.returncode == 130, first.stdout + first.stderr
    folder, jobs = record(here)
    by_name = {job["choices"]["reward.target"].removeprefix("mine:"): job for job in jobs.values()}
    states = {name: job["state"] for name, job in by_name.items()}
    assert states == {"length": "done", "fails": "failed", "killed": "interrupted", "interrupted": "interrupted"}
    assert "no such luck" in first.stdout and "signal 9" in first.stdout
    for job in jobs.values():  # each with its reason, at the end of the output
        said = f"{job['name']} {job['state']}: {job['note']} (see "
        assert (said in first.stdout and job["note"] != "") == (job["state"] != "done"), (said, first.stdout)
    kept = (folder / by_name["length"]["folder"] / "metrics.jsonl").stat().st_mtime_ns

    (here / "mended").touch()
    second = sweep(here, *reversed(choices))  # the order of the overrides makes no other sweep
    assert second.returncode == 0, second.stdout + second.stderr
    assert "1 of them done before" in second.stdout
    assert {job["state"] for job in record(here)[1].values()} == {"done"}
    assert sorted(job["attempts"] for job in record(here)[1].values()) == [1, 2, 2, 2]
    assert (folder / by_name["length"]["folder"] / "metrics.jsonl").stat().st_mtime_ns == kept
