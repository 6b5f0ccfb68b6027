"""The run directory: what is written can be read back, survives a crash, and a resume records each step once."""

from __future__ import annotations

import json
import math
import subprocess
from concurrent.futures import Future
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.errors import AsyncRLHFError, CheckpointError, ConfigError
from asyncrlhf.records.show.summary import (
    _moved,
    build_summary,
    git_state,
    ledger_totals,
    plain_words,
    reward_ends,
    time_weighted_mean,
)
from asyncrlhf.records.write.record_marker import RecordMarker, check_records
from asyncrlhf.records.write.recorder import RunRecorder, read_metrics
from asyncrlhf.records.write.rollout_rows import ROLLOUT_SCHEMA, RolloutRow
from asyncrlhf.types import Prompt

SMALL = LoggingConfig(wandb="disabled", progress="none", flush_every=4)
# Copied by hand out of the design's table: tools outside this package read these columns.
CONTRACT = [
    *("rollout_id", "group_id", "prompt", "response", "reward", "policy_versions", "behavior_logprobs"),
    *("consumed_at_version", "staleness", "state", "drop_reason", "generator_id"),
    *("admitted_at", "generated_at", "scored_at", "consumed_at", "epoch", "extra"),
    *("turns", "episode_reward", "prompt_length", "forks"),
]


def row(rollout_id: int, **changes: object) -> RolloutRow:
    values: dict[str, object] = {
        "rollout_id": rollout_id,
        "group_id": rollout_id // 2,
        "prompt": "17+25=",
        "response": "42",
        "reward": 1.0,
        "policy_versions": np.array([3, 4], dtype=np.int64),
        "behavior_logprobs": np.array([-0.5, -0.25], dtype=np.float32),
        "consumed_at_version": (4,),
        "staleness": 1,
        "state": "trained",
        "generator_id": "generator-0",
        "admitted_at": 1.0,
        "generated_at": 2.0,
        "scored_at": 2.5,
        "consumed_at": 3.0,
    }
    return RolloutRow(**{**values, **changes})  # type: ignore[arg-type]


def read_rollouts(run_dir: Path) -> list[dict[str, object]]:
    parts = sorted((run_dir / "rollouts").glob("*.parquet"))
    return [record for part in parts for record in pq.read_table(part).to_pylist()]


def fill(recorder: RunRecorder, steps: range) -> None:
    for step in steps:
        recorder.log_step({"step": step, "reward_mean": step / 10})
        recorder.record([row(3 * step + i) for i in range(3)])


def test_columns_are_the_contract_and_values_survive(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {}, SMALL)
    dropped = row(1, state="dropped", drop_reason="stale", consumed_at_version=(), staleness=None, consumed_at=None)
    failed = RolloutRow(rollout_id=2, group_id=1, prompt="1+1=", state="failed", admitted_at=0.5)
    recorder.record([row(0), dropped, failed])
    recorder.close()

    table = pq.read_table(tmp_path / "rollouts" / "part-00000.parquet")
    assert table.schema.names == CONTRACT == ROLLOUT_SCHEMA.names
    assert {f.name for f in fields(RolloutRow)} == set(CONTRACT)
    first, second, third = table.to_pylist()
    assert first["policy_versions"] == [3, 4] and first["consumed_at_version"] == [4]
    assert first["behavior_logprobs"] == [-0.5, -0.25]
    assert (second["drop_reason"], second["staleness"], second["consumed_at_version"]) == ("stale", None, [])
    assert (third["response"], third["reward"], third["policy_versions"]) == (None, None, [])


def test_a_line_is_on_disk_at_once_and_nan_is_null_and_it_has_a_step(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {}, SMALL)
    recorder.log_step({"step": 1, "loss": float("nan"), "kl": np.float32("inf"), "reward_mean": np.float32(0.5)})
    line = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="step"):
        recorder.log_step({"loss": 1.0})
    recorder.close()
    assert line.endswith("\n") and json.loads(line) == {"step": 1, "loss": None, "kl": None, "reward_mean": 0.5}


def test_config_is_written_at_the_start(tmp_path: Path) -> None:
    config = {"seed": 3, "async": {"mode": "async"}, "task": {"digits": (1, 2), "path": Path("a/b")}}
    RunRecorder(tmp_path, config, SMALL).close()
    read = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert read == {"seed": 3, "async": {"mode": "async"}, "task": {"digits": [1, 2], "path": "a/b"}}
    assert list(read) == ["seed", "async", "task"]


def test_parts_hold_every_row_once_in_order(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {}, SMALL)
    for start in range(0, 30, 3):
        recorder.record([row(i) for i in range(start, start + 3)])
    recorder.finish({"steps": 10})
    parts = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert parts == [f"part-{i:05d}.parquet" for i in range(8)]  # 30 rows by four
    assert [record["rollout_id"] for record in read_rollouts(tmp_path)] == list(range(30))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 10}


@pytest.mark.parametrize("stop", ["crash", "finish"])
def test_resume_leaves_what_an_uninterrupted_run_leaves(tmp_path: Path, stop: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    recorder = RunRecorder(whole, {}, SMALL)
    fill(recorder, range(1, 6))
    recorder.checkpoint()
    fill(recorder, range(6, 11))
    recorder.finish({})

    recorder = RunRecorder(cut, {}, SMALL)
    fill(recorder, range(1, 6))
    marker = RecordMarker(**json.loads(json.dumps(asdict(recorder.checkpoint()))))
    fill(recorder, range(6, 9))  # beyond the checkpoint: to be done again
    recorder.finish({}) if stop == "finish" else recorder.close()
    if stop == "crash":
        with (cut / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "rew')
        (cut / "rollouts" / "part-00099.tmp").write_bytes(b"half a file")
    recorder = RunRecorder(cut, {}, SMALL, resume_from=marker)
    assert not (cut / "summary.json").exists()
    fill(recorder, range(6, 11))
    recorder.finish({})

    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert sorted(p.name for p in (cut / "rollouts").iterdir()) == sorted(
        p.name for p in (whole / "rollouts").iterdir()
    )
    assert read_rollouts(cut) == read_rollouts(whole)


@pytest.mark.parametrize("undo", ["training", "all"])
def test_what_a_rollback_writes_again_gets_a_new_seal(tmp_path: Path, undo: str) -> None:
    recorder = RunRecorder(tmp_path, {}, SMALL)
    fill(recorder, range(1, 3))
    first = recorder.checkpoint()
    fill(recorder, range(3, 5))
    second = recorder.checkpoint()
    check_records(tmp_path, second)
    if undo == "training":
        recorder.undo_training(first, 4, ())
    else:
        recorder.rewind(first)
    fill(recorder, range(3, 4))
    recorder.log_step({"step": 4, "reward_mean": 1.0})  # as many lines as before, of which the last is another
    third = recorder.checkpoint()
    recorder.finish({})
    name = f"rollouts/part-{first.parts:05d}.parquet"
    assert third.seals[name] != second.seals[name]
    assert third.metrics_lines == second.metrics_lines
    assert third.seals["metrics.jsonl"] != second.seals["metrics.jsonl"]
    check_records(tmp_path, third)


def test_a_used_folder_is_refused_and_a_marker_must_fit(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {"seed": 1}, SMALL)
    fill(recorder, range(1, 4))
    recorder.finish({})
    with pytest.raises(ConfigError, match="already holds a run"):
        RunRecorder(tmp_path, {"seed": 2}, SMALL)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 1}
    with pytest.raises(CheckpointError, match="3 lines"):
        RunRecorder(tmp_path, {}, SMALL, resume_from=RecordMarker(metrics_lines=4, parts=1))
    with pytest.raises(CheckpointError, match="part-00003"):
        RunRecorder(tmp_path, {}, SMALL, resume_from=RecordMarker(metrics_lines=3, parts=4))
    RunRecorder(tmp_path, {}, SMALL, resume_from=RecordMarker()).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [] and read_rollouts(tmp_path) == []


def test_several_writing_errors_are_the_first_one(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {}, SMALL)
    failed: list[Future[None]] = []

    def submit(*_: Any) -> Future[None]:
        failed.append(Future())
        failed[-1].set_exception(OSError(f"part {len(failed)}"))
        return failed[-1]

    recorder.write_with(submit)
    recorder._pending += [submit(), submit(), submit()]
    for _ in range(2):
        with pytest.raises(AsyncRLHFError, match="part 1"):
            recorder.raise_if_failed()
    with pytest.raises(AsyncRLHFError, match="part 1"):
        recorder.finish({})
    assert (tmp_path / "summary.json").is_file()


def test_a_writing_error_surfaces_and_nobody_hangs(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {}, SMALL)
    recorder.record([row(0, policy_versions=["not a number"]) for _ in range(4)])
    with pytest.raises(AsyncRLHFError, match="rollout records could not be written"):
        recorder.checkpoint()
    with pytest.raises(AsyncRLHFError, match="rollout records"):
        for start in range(100):
            recorder.record([row(start)] * 4)
    with pytest.raises(AsyncRLHFError, match="rollout records"):
        recorder.finish({"steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3, "records_whole": False}


def test_rollouts_can_be_switched_off(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {}, LoggingConfig(rollouts=False))
    fill(recorder, range(1, 4))
    marker = recorder.checkpoint()
    assert (marker.metrics_lines, marker.parts, *marker.seals) == (3, 0, "metrics.jsonl")
    recorder.finish({})
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_a_torn_last_line_is_left_out_and_a_broken_middle_is_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_metrics(path)


@pytest.mark.parametrize("wrong", ['{"st', "", '{"step": 1},{"step": 2}', "7", '"a"'])
def test_lines_are_read_in_blocks_and_told_one_by_one(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.5}) for step in range(1, 2601)]
    path.write_text("\n".join(lines))
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [*range(1, 2601)]
    assert len({id(key) for row in rows for key in row}) <= 6, "the rows of a block share their keys"
    lines[1499] = wrong
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 1500 is not"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"wandb": "onlin"}, "logging.wandb"),
        ({"progress": "fancy"}, "logging.progress"),
        ({"flush_every": 0}, "logging.flush_every"),
        ({"wandb_project": ""}, "logging.wandb_project"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        LoggingConfig(**settings)  # type: ignore[arg-type]


def metrics_of(steps: int) -> list[dict[str, object]]:
    """Step s takes s seconds and trains 12 samples, half of them idle."""
    return [
        {
            "step": s,
            "policy_version": s,
            "wall_time": s * (s + 1) / 2,
            "reward_mean": s / steps,
            "staleness_mean": 0.5,
            "staleness_max": s % 3,
            "samples_per_second": 12 / s,
            "learner_idle_fraction": 0.5,
            "weight_sync_seconds": 0.1 if s % 2 else None,
        }
        for s in range(1, steps + 1)
    ]


def write_metrics(run_dir: Path, steps: int) -> None:
    recorder = RunRecorder(run_dir, {}, SMALL)
    for line in metrics_of(steps):
        recorder.log_step(line)
    recorder.close()


def finished_ledger() -> Ledger:
    """Eight rollouts: five trained, one dropped as stale, one failed, one still generating."""
    ledger = Ledger()
    prompt = Prompt("p", "1+1=", np.array([1, 2]))
    for i in range(8):
        ledger.admit(i, i // 2, prompt, 0.0)
        ledger.start(i, "generator-0", 0)
        if i == 7:
            continue
        ledger.finish_generation(i)
        if i == 6:
            ledger.fail(i, "the reward function raised ValueError")
            continue
        ledger.buffer(i)
        ledger.drop(i, "stale") if i == 5 else ledger.train(i, 0, last_use=True)
    return ledger


def summary_of(run_dir: Path, **changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "ledger": finished_ledger().counts(),
        "seed": 7,
        "steps_planned": 30,
        "staleness_bound": 2,
        "exit_reason": "done",
        "evaluated": ({"heldout_accuracy": 0.25}, {"heldout_accuracy": 0.75}),
    }
    return build_summary(run_dir, **{**arguments, **changes})  # type: ignore[arg-type]


def test_summary_holds_the_sums_by_hand(tmp_path: Path) -> None:
    write_metrics(tmp_path, 30)
    summary = summary_of(tmp_path)
    ends = {"first": 2 / 30, "last": 29 / 30, "window": 3, "standard_error": None}  # three steps are too few for one
    assert summary["reward"] == pytest.approx(ends)
    assert summary["staleness"] == {"mean": 0.5, "max": 2, "bound": 2}
    of_heldout = {"before": 0.25, "after": 0.75, "standard_error": None, "measure": "accuracy"}
    assert summary["heldout_accuracy"] == of_heldout
    # 12 samples a step, 30 steps, 465 seconds: a rate is total over total, not the mean of rates
    assert summary["timings"]["samples_per_second"] == pytest.approx(360 / 465)  # type: ignore[index]
    assert summary["timings"]["weight_sync_seconds"] == pytest.approx(0.1)  # type: ignore[index]
    totals = {"admitted": 8, "trained": 5, "uses": 5, "dropped": {"stale": 1}, "left": 1, "adds_up": True}
    assert summary["ledger"] == {**totals, "failed": {"the reward function raised ValueError": 1}}
    assert {"torch", "ray", "numpy"} <= set(summary["packages"])  # type: ignore[call-overload]
    assert (summary["steps"], summary["seed"], summary["wall_seconds"]) == (30, 7, 465)
    json.dumps(summary, allow_nan=False)


def test_summary_of_a_run_without_a_step(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, evaluated=({}, {}), exit_reason="failed: the Llama is missing.")
    assert summary["steps"] == 0 and summary["reward"] == {
        "first": None, "last": None, "window": 1, "standard_error": None,
    }  # fmt: skip
    words = plain_words(summary)
    assert "stopped after 0 of 30" in words and "Failed: the Llama is missing." in words and "No learner step" in words


def test_a_ledger_that_does_not_add_up_is_shouted() -> None:
    counts = finished_ledger().counts()
    counts["trained"] -= 1
    assert ledger_totals(counts)["adds_up"] is False


def test_time_weighted_mean_without_times_is_plain() -> None:
    assert time_weighted_mean([{"x": 1.0}, {"x": 3.0}, {"x": None}], "x") == 2.0
    assert time_weighted_mean([], "x") is None
    ends = {"first": 0.5, "last": 0.5, "window": 1, "standard_error": None}
    assert reward_ends([{"reward_mean": 0.5}]) == ends


def noisy(change: float, spread: float = 0.1) -> list[dict[str, float]]:
    """100 steps; the last ten are ``change`` above the first ten. Each ten spread by ``spread`` about their mean."""
    wave = [spread, -spread] * 50
    return [{"reward_mean": 0.5 + wave[i] + change * (i >= 90)} for i in range(100)]


def test_a_reward_rose_only_beyond_two_standard_errors() -> None:
    error = 0.1 * math.sqrt(10 / 9) * math.sqrt(2 / 10)  # of the difference of two means of ten
    assert reward_ends(noisy(0.3))["standard_error"] == pytest.approx(error)
    told = {change: _moved(reward_ends(noisy(change)), "first", "last") for change in (2.1 * error, 1.9 * error)}
    assert told[2.1 * error].startswith("rose from 0.500 to 0.599, a change of +0.099 (standard error 0.047)")
    assert told[1.9 * error].startswith("went from 0.500 to 0.590") and "no more than its noise" in told[1.9 * error]
    assert _moved(reward_ends(noisy(-0.3)), "first", "last").startswith("fell from 0.500 to 0.200")


def test_held_out_accuracy_has_the_error_of_its_prompts(tmp_path: Path) -> None:
    heldout = ({"heldout_accuracy": 0.3}, {"heldout_accuracy": 0.4})
    few = summary_of(tmp_path, evaluated=heldout, heldout_prompts=64)
    assert few["heldout_accuracy"]["standard_error"] == pytest.approx(math.sqrt((0.21 + 0.24) / 64))  # type: ignore[index]
    assert "went from 0.300 to 0.400, a change of +0.100, no more than its noise" in plain_words(few)
    many = summary_of(tmp_path, evaluated=heldout, heldout_prompts=1024)
    assert "rose from 0.300 to 0.400" in plain_words(many)
    beyond = summary_of(tmp_path, evaluated=(heldout[0], {"heldout_accuracy": 7.0}), heldout_prompts=1024)
    assert "went from 0.300 to 7.000, a change of +6.700." in plain_words(beyond)


def test_a_learned_reward_between_0_and_1_is_no_accuracy(tmp_path: Path) -> None:
    """The error of 0/1 answers says nothing about scores of any size whose mean is 0.3."""
    heldout = ({"heldout_accuracy": 0.3}, {"heldout_accuracy": 0.4})
    learned = summary_of(tmp_path, evaluated=heldout, heldout_prompts=1024, heldout_measure="reward")
    assert learned["heldout_accuracy"]["standard_error"] is None  # type: ignore[index]
    said = plain_words(learned)
    assert "Held-out reward, on prompts never trained on, went from 0.300 to 0.400, a change of +0.100." in said
    assert "accuracy" not in said


def test_plain_words_tell_the_whole_story(tmp_path: Path) -> None:
    write_metrics(tmp_path, 30)
    words = plain_words(summary_of(tmp_path))
    sentences = words.split("\n\n")[0].splitlines()
    assert 6 <= len(sentences) <= 10
    for fact in (
        "30 learner steps in 7 min 45 s",
        "went from 0.067 to 0.967",
        "from 0.250 to 0.750, a change of +0.500",
        "0.50 policy versions old on average and 2 at most (bound: 2)",
        "learner 50%",
        "0.8 samples/s",
        "1 rollout failed",
        "admitted (adds up)",
        str(tmp_path),
    ):
        assert fact in words, fact


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    run = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*run, "init", "-q"], check=True)
    (tmp_path / "installed").mkdir()
    (tmp_path / "code.py").write_text("x = 1\n")
    subprocess.run([*run, "add", "."], check=True)
    subprocess.run([*run, "commit", "-qm", "first"], check=True)
    commit = subprocess.run([*run, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "code.py").write_text("x = 2\n")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}
    assert git_state(tmp_path / "installed") is None  # inside a repository that does not track it
