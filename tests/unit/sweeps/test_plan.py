"""The jobs of a sweep: choices, seeds and grids, names, and what makes two sweeps the same one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.errors import ConfigError
from asyncrlhf.sweeps import record as record_module
from asyncrlhf.sweeps.plan import plan_sweep
from asyncrlhf.sweeps.record import SweepRecord, owned, read_sweep


def test_choices_times_seeds_seed_by_seed() -> None:
    plan = plan_sweep(["async=fixed_lag", "async.lag=range(0,3)", "algorithm=grpo,decoupled_grpo", "seeds=2"])
    assert len(plan.jobs) == 12 and [job.seed for job in plan.jobs] == [0] * 6 + [1] * 6
    assert {(job.config.async_.lag, job.config.algorithm.name) for job in plan.jobs[:6]} == {
        (lag, name) for lag in range(3) for name in ("grpo", "decoupled_grpo")
    }
    assert plan.jobs[0].name == "lag=0,algorithm=grpo,seed=0"


def test_globs_and_explicit_seeds_are_hydras() -> None:
    assert len(plan_sweep(["algorithm=glob(d*grpo)"]).jobs) == 2
    assert [job.seed for job in plan_sweep(["seed=3,5"]).jobs] == [3, 5]


def test_the_folder_is_that_of_the_set_of_jobs() -> None:
    one = plan_sweep(["async.max_staleness=0,1", "algorithm=grpo", "seeds=2"])
    other = plan_sweep(["seeds=2", "algorithm=grpo", "async.max_staleness=1,0"])
    third = plan_sweep(["async.max_staleness=0,2", "algorithm=grpo", "seeds=2"])
    assert one.folder_name == other.folder_name != third.folder_name
    told = plan_sweep(["async.max_staleness=0,1", "algorithm=grpo", "seeds=2", "logging.progress=none"])
    assert told.folder_name == one.folder_name  # what is shown is no other result


def test_grids_by_name_with_their_own_seeds_and_timing(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "two.yaml").write_text(
        "# @package _global_\nsteps: 7\nsweep:\n  seeds: 3\n  parts:\n"
        "    quality: {overrides: ['async=fixed_lag', 'async.lag=0,2']}\n"
        "    speed: {overrides: ['async=sync,async'], seeds: 2, timing: exclusive}\n"
    )
    plan = plan_sweep(["--config-dir", str(tmp_path), "experiment=two"])
    assert [(job.part, job.timing) for job in plan.jobs] == [("quality", "shared")] * 6 + [("speed", "exclusive")] * 4
    # Configurations alternate, so that a change of the machine meets all of them.
    assert [job.choices["async"] for job in plan.jobs[6:]] == ["sync", "async", "sync", "async"]
    assert plan.name == "two" and all(job.config.steps == 7 for job in plan.jobs)
    fewer = plan_sweep(["--config-dir", str(tmp_path), "experiment=two", "async.lag=4", "sweep.timing=exclusive"])
    assert {job.config.async_.lag for job in fewer.jobs if job.part == "quality"} == {4}
    assert {job.timing for job in fewer.jobs} == {"exclusive"}


def test_combinations_that_contradict_themselves_are_left_out_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_sweep(["async.mode=sync,async", "async.max_staleness=0,4"])
    kept = [tuple(job.choices.values()) for job in plan.jobs]
    assert kept == [("async", "0"), ("async", "4")]
    for bound, said in zip((0, 4), plan.left_out, strict=True):
        given = f"async.max_staleness={bound}"
        assert said.startswith(f"async.mode=sync, {given}: {given} contradicts async.mode=sync")
    assert main(["sweep", "async=sync,fill", "async.max_staleness=8", "--list"]) == 0
    assert "left out: async=sync: async.max_staleness=8 contradicts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["async=fixed_lag", "async.lag=0,-1"], "async.lag=-1 is out of range"),
        (["async=sync,one_step", "async.max_staleness=4,8"], "no job of the sweep can run"),
        (["sweep.timing=alone"], "sweep.timing=alone is not known"),
        (["sweep.seeds=1,2"], "sweep.seeds has several values"),
        (["run_dir=here"], "run_dir cannot be set for a sweep"),
        (["hydra.launcher.n_jobs=2"], "asyncrlhf train -m"),
        (["seeds=0"], "sweep.seeds=0 is out of range"),
        (["async.max_stalenes=0,1"], "did you mean async.max_staleness?"),
        (["checkpoint.every=1,2"], "checkpoint.every has several values and does not change what a job computes"),
        (["name=a,b"], "name has several values and does not change"),
        (["logging.wandb=offline,disabled", "seeds=2"], "logging.wandb has several values and does not change"),
        (["task=prompts", "task.path=missing.jsonl,other.jsonl"], "task.path=missing.jsonl does not exist"),
        (["lr=3"], "lr is not a setting (did you mean learner.learning_rate?)"),
        (["--jobs"], "--jobs is not an option"),
        (["sweep.name=a b"], "sweep.name=a b must be a folder's name"),
    ],
)
def test_a_wrong_word_is_one_sentence_before_anything_starts(
    overrides: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *overrides]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_sweep_takes_up_what_was_done_and_names_what_changed(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    overrides = ["task=prompts", f"task.path={data}", "seeds=2"]
    record = SweepRecord(tmp_path, plan_sweep(overrides))
    record.join(accept_changed=False)
    first, second = record.jobs.values()
    extra = record.begin(first)
    assert extra[1] == "checkpoint.resume=no"
    (tmp_path / first.folder).mkdir(parents=True)
    (tmp_path / first.folder / "summary.json").write_text('{"exit_reason": "done"}')
    record.end(first, "done", 1.0)
    record.begin(second)  # and the command is killed

    again = SweepRecord(tmp_path, plan_sweep(overrides))
    again.join(accept_changed=False)
    assert [job.state for job in again.jobs.values()] == ["done", "interrupted"]
    data.write_text('{"prompt": "1+1=", "answer": "3"} \n')
    with pytest.raises(ConfigError, match=r"another content of task\.path=.*--accept-changed"):
        SweepRecord(tmp_path, plan_sweep(overrides)).join(accept_changed=False)
    changed = SweepRecord(tmp_path, plan_sweep(overrides))
    changed.join(accept_changed=True)
    assert changed.jobs[first.hash].state == "done"
    assert read_sweep(tmp_path)["jobs"][1]["state"] == "interrupted"


@pytest.mark.more_but(every=4)
def test_each_change_of_code_or_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("saved/train", "reward_parts", "package"):
        (tmp_path / folder).mkdir(parents=True)
    files = {  # by what they are: path and content
        "mixture": ("mixed.jsonl", '{"prompt": "1+1=", "answer": "2"}\n'),
        "nested": ("saved/train/rows.txt", "rows"),
        "helper": ("reward_parts/units.py", "def one():\n    from .tables import ONE\n    return ONE\n"),
        "deep": ("reward_parts/tables.py", "ONE = 1.0\n"),
        "reward": (
            "sweep_reward.py",
            "from reward_parts import units\ndef f(completions, **columns):\n    return [units.one()]\n",
        ),
        "sink": ("sweep_sink.py", "import sink_format\nclass Mine:\n    ...\n"),
        "sink_helper": ("sink_format.py", ""),
    }
    for name, content in files.values():
        (tmp_path / name).write_text(content)
    monkeypatch.delitem(sys.modules, "sweep_reward", raising=False)
    importlib.import_module("sweep_reward")  # as first_look does
    parts = "{a:{path:mixed.jsonl,weight:1},b:{path:saved,weight:1}}"
    overrides = ["task=prompts", f"task.mixture={parts}", "reward.kind=python", "reward.target=sweep_reward:f"]
    overrides.append("logging.sinks=[sweep_sink:Mine]")
    before = SweepRecord(tmp_path / "sweep", plan_sweep(overrides))
    before.folder.mkdir()
    before.join(accept_changed=False)
    (job,) = before.jobs.values()
    before.begin(job)
    (before.folder / job.folder).mkdir(parents=True)
    (before.folder / job.folder / "summary.json").write_text('{"exit_reason": "done"}')
    before.end(job, "done", 1.0)

    def again() -> None:
        SweepRecord(before.folder, plan_sweep(overrides)).join(accept_changed=False)

    again()
    for changed, (name, content) in files.items():
        (tmp_path / name).write_text(content + "\n")
        setting = "logging.sinks" if "sink" in changed else "reward.target"
        words = "mixture" if changed in ("mixture", "nested") else f"{setting}={tmp_path / name}"
        with pytest.raises(ConfigError, match=f"another content of .*{words}.*--accept-changed"):
            again()
        (tmp_path / name).write_text(content)
    again()
    (tmp_path / "package" / "code.py").write_text("1")  # one uncommitted change more
    monkeypatch.setattr(record_module, "conf_folder", lambda: tmp_path / "package")
    with pytest.raises(ConfigError, match=r"another state of the code.*--accept-changed"):
        again()


def test_choices_that_compute_the_same_are_named() -> None:
    plan = plan_sweep(["learner.learning_rate=1e-4,0.0001"])
    (said,) = plan.left_out
    assert len(plan.jobs) == 1
    assert said == "learner.learning_rate=0.0001: computes the same as seed=0."


def test_a_killed_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    record = SweepRecord(tmp_path, plan_sweep(["seeds=1"]))
    (job,) = record.jobs.values()
    record.begin(job)
    checkpoint = tmp_path / job.folder / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    folder = job.folder
    (checkpoint / "controller.json").touch()
    record.end(job, "interrupted", 1.0)
    assert record.begin(job)[1] == "checkpoint.resume=auto" and job.folder == folder and job.attempts == 1


def test_a_second_command_on_one_folder_is_refused(tmp_path: Path) -> None:
    said = r"is being written by process \d+ on .*give another sweep\.name"
    with owned(tmp_path), pytest.raises(ConfigError, match=said), owned(tmp_path):
        pass
    with owned(tmp_path):
        pass
