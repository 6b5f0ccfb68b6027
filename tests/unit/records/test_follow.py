"""A run is followed by its files: lines that are not whole yet, a file that was cut back, a run that starts later."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from asyncrlhf.records.read.follow import QUIET_SECONDS, MetricsTail, RunFollower, newest_run
from asyncrlhf.records.write.rollout_rows import RolloutRow, write_part


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def steps(tail: MetricsTail) -> list[int]:
    return [row["step"] for row in tail.rows]


def test_a_torn_line_waits_and_a_file_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.read() and tail.rows == []
    path.write_text(line(1) + line(2) + '{"step": 3, "rew')
    assert tail.read() and steps(tail) == [1, 2]
    with path.open("a") as file:
        file.write('ard": 1.0}\n')
    assert tail.read() and steps(tail) == [1, 2, 3] and tail.rows[2]["reward"] == 1.0
    assert not tail.read()
    path.write_text(line(1) + line(2))  # resumed from step 2
    tail.read()
    assert steps(tail) == [1, 2]
    path.write_text(line(1) + line(2, reward_mean=7.0) + line(3) + line(4))  # cut back and grown beyond where we were
    tail.read()
    assert steps(tail) == [1, 2, 3, 4] and tail.rows[1]["reward_mean"] == 7.0
    path.unlink()
    assert tail.read() and tail.rows == []


def test_a_line_torn_by_a_crash_hides_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + '{"step": 2, "re\n' + line(3))
    tail = MetricsTail(path)
    tail.read()
    assert steps(tail) == [1, 3]


def test_a_run_is_told_of_before_during_and_after(tmp_path: Path) -> None:
    run = RunFollower(tmp_path / "later")
    run.read()
    assert run.state(0.0) == "has not started yet" and run.steps == (0, 0) and run.replicas == {}
    run.path.mkdir()
    (run.path / "config.yaml").write_text(yaml.safe_dump({"steps": 9}))
    metrics = run.path / "metrics.jsonl"
    now = (run.path / "config.yaml").stat().st_mtime
    run.read()
    assert run.state(now) == "starting"
    metrics.write_text(line(1, heldout_accuracy=0.5) + line(2, generator_idle_fraction=0.25, rollouts_in_flight=8))
    os.utime(metrics, (now, now))
    run.read()
    assert run.state(now) == "running" and run.steps == (2, 9) and run.last["heldout_accuracy"] == 0.5
    assert run.replicas == {"generator": {"idle_fraction": 0.25, "in_flight": 8}}
    assert "silent for" in run.state(now + QUIET_SECONDS + 60)
    (run.path / "summary.json").write_text('{"exit_re')  # half written
    run.read()
    assert run.state(now) == "running"
    summary = {"exit_reason": "done", "heldout_accuracy": {"before": 0.25, "after": 0.75}}
    (run.path / "summary.json").write_text(json.dumps(summary))
    run.read()
    assert run.state(now) == "done"
    assert run.values("heldout_accuracy") == [0.25, 0.5, 0.75] and run.last["heldout_accuracy"] == 0.75


def test_replicas_and_the_last_rollouts_first(tmp_path: Path) -> None:
    run = RunFollower(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text(line(1, **{"generator/g-0/lag": 1, "generator/g-1/lag": 2}))
    for part in range(2):
        rows = [RolloutRow(10 * part + i, 0, f"p{i}", "trained", 0.0, response="r", reward=1.0) for i in range(3)]
        write_part(tmp_path / "rollouts" / f"part-{part:05d}.parquet", rows)
    run.read()
    assert run.replicas == {"g-0": {"lag": 1}, "g-1": {"lag": 2}}
    assert [row["rollout_id"] for row in run.rollouts] == [12, 11, 10]


def test_the_newest_run_below_a_folder_is_the_one_written_to_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    for number, name in enumerate(("sums/old", "sweeps/s/jobs/new", "sums/middle")):
        (tmp_path / name).mkdir(parents=True)
        config, metrics = tmp_path / name / "config.yaml", tmp_path / name / "metrics.jsonl"
        config.write_text("{}")
        metrics.write_text("")
        os.utime(config, (1, 1))
        os.utime(metrics, (10 + number % 2, 10 + number % 2))
    assert newest_run(tmp_path) == tmp_path / "sweeps/s/jobs/new"
    assert newest_run(tmp_path / "sums/old") == tmp_path / "sums/old"
