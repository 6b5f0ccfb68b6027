"""The command line from end to end in the local runtime: bad input, the run directory, sweeps, evaluation, report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator import run as run_module
from asyncrlhf.report import html
from asyncrlhf.report.panels import PANELS

ROOT = Path(__file__).resolve().parents[2]
METRICS = [
    "step",
    "policy_version",
    "wall_time",
    "reward_mean",
    "staleness_mean",
    "staleness_max",
    "staleness_in_flight_mean",
    "staleness_in_queue_mean",
    "ess_fraction",
    "behavior_kl",
    "mismatch_kl",
    "ref_kl",
    "clip_fraction",
    "entropy",
    "loss",
    "grad_norm",
    "samples_per_second",
    "tokens_per_second",
    "learner_idle_fraction",
    "generator_idle_fraction",
    "weight_sync_seconds",
    "buffer_size",
    "response_length_mean",
]
COLUMNS = [
    "rollout_id",
    "group_id",
    "prompt",
    "response",
    "reward",
    "policy_versions",
    "behavior_logprobs",
    "consumed_at_version",
    "staleness",
    "state",
    "drop_reason",
    "generator_id",
    "admitted_at",
    "generated_at",
    "scored_at",
    "consumed_at",
    "epoch",
    "extra",
    "turns",
    "episode_reward",
    "prompt_length",
    "forks",
]
TINY = ("runtime=local", "batch_size=16", "learner.learning_rate=1e-4", "task.heldout_size=8", "logging.progress=none")
BARE = (*TINY, "logging.wandb=disabled", "logging.report=false")
REWARDS = """
def whole(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

def raises(prompts, completions, **columns):
    raise RuntimeError("no such luck\\nand a second line")

def nan(prompts, completions, **columns):
    return [float("nan") for _ in completions]

def short(prompts, completions, **columns):
    return []

number = 3
"""
FILES = {
    "keyless.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"question": "2+2="}\n',
    "good.jsonl": "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(30)),
    "faulty_module.py": "import a_package_that_nobody_has\n",
    "cli_rewards.py": REWARDS,
    "used/metrics.jsonl": '{"step": 1}\n',
    "no_model/notes.txt": "",
    "empty_run/notes.txt": "",
}
# One prompt of 123 tokens: task.max_prompt_length allows it, the tiny model's context of 128 with a response does not.
FILES["wide.jsonl"] = FILES["good.jsonl"] + json.dumps({"prompt": "1+" * 60 + "1=", "answer": "61"}) + "\n"

BAD_INPUT = [
    ("model.path=./nowhere", ["model.path=./nowhere does not exist", "tiny, smollm2"]),
    ("model.path=nowhere-at-all", ["model.path=nowhere-at-all could not be loaded"]),
    ("model.path=no_model", ["model.path=no_model", "config.json"]),
    ("task=prompts task.path=nowhere.jsonl", ["task.path=nowhere.jsonl does not exist"]),
    ("task=prompts task.path=keyless.jsonl", ["keyless.jsonl line 2", "'prompt'", "question"]),
    ("task=prompts task.path=good.jsonl task.max_prompt_length=4", ["line 1 ", "5 tokens", "max_prompt_length=4"]),
    ("task=prompts task.path=wide.jsonl", ["line 31 has 123 tokens", "128 tokens of context", "model.path=tiny"]),
    ("generator.max_completion_length=4000", ["generator.max_completion_length=4000", "128 tokens of context"]),
    ("reward.kind=python reward.target=nobody_has_this:f", ["reward.target=nobody_has_this:f cannot be imported"]),
    ("reward.kind=python reward.target=faulty_module:f", ["a_package_that_nobody_has"]),
    ("reward.kind=python reward.target=cli_rewards:missing", ["has no 'missing'"]),
    ("reward.kind=python reward.target=cli_rewards:number", ["not a function"]),
    ("reward.kind=python reward.target=cli_rewards:raises", ["cli_rewards:raises", "no such luck and a second line"]),
    ("reward.kind=python reward.target=cli_rewards:nan", ["cli_rewards:nan", "not a finite number"]),
    ("reward.kind=python reward.target=cli_rewards:short", ["0 scores for 2 completions"]),
    ("run_dir=used", ["run_dir=used already holds a run", "checkpoint.resume=auto"]),
    ("run_dir=good.jsonl", ["run_dir=good.jsonl cannot be written"]),
    ("checkpoint.resume=empty_run", ["checkpoint.resume=empty_run holds no checkpoint", "auto"]),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with files of every kind; imports from it do not outlive the test."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("cli_rewards", "faulty_module"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.startswith("asyncrlhf: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(("typed", "words"), BAD_INPUT, ids=[typed for typed, _ in BAD_INPUT])
def test_bad_input_is_one_sentence_before_anything_starts(
    typed: str, words: list[str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "build_runtime", lambda config: pytest.fail("a part was started"))
    assert main(["train", "logging.wandb=disabled", *typed.split()]) == 2
    said = sentence(capsys)
    assert [word for word in words if word not in said] == [], said
    assert files(here) == set(FILES) and not (here / "runs").exists()


def shell(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncrlhf", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=here, env=environment)


def test_a_shell_sees_exit_code_2_and_one_line(here: Path) -> None:
    """With the default runtime: Ray must not have been started for it."""
    done = shell(here, "train", "-m", "async.mode=sync,asink")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "async.mode=asink is not known (did you mean async?)" in done.stderr
    assert files(here) == set(FILES) and not (here / "runs").exists()


def test_a_run_leaves_its_directory(here: Path) -> None:
    """The whole contract of the run directory, from a shell, with a reward function of the current folder."""
    done = shell(
        here, "train", *TINY, "steps=4", "run_dir=out", "checkpoint.every=2", "seed=3",
        "reward.kind=python", "reward.target=cli_rewards:whole",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = here / "out"
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["seed"], config["steps"], config["async"]["max_staleness"]) == (3, 4, 2)
    assert config["reward"]["target"] == "cli_rewards:whole"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [sorted(set(METRICS) - row.keys()) for row in rows] == [[]] * 4
    rollouts = pd.read_parquet(out / "rollouts")
    assert list(rollouts.columns) == COLUMNS
    assert (rollouts.reward == rollouts.response.str.len()).all(), "the user's function gave the rewards"
    check_summary(json.loads((out / "summary.json").read_text()), rows, rollouts)
    assert list((out / "wandb").glob("offline-run-*/*.wandb"))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert [p.name for p in (out / "report").iterdir()] == ["index.html"]
    assert "Report: out/report/index.html" in done.stdout.splitlines()


def check_summary(summary: dict[str, Any], rows: list[dict[str, Any]], rollouts: pd.DataFrame) -> None:
    assert summary["exit_reason"] == "done" and summary["seed"] == 3
    assert summary["ledger"]["adds_up"] and summary["ledger"]["trained"] == (rollouts.state == "trained").sum() == 64
    assert (summary["reward"]["first"], summary["reward"]["last"]) == (rows[0]["reward_mean"], rows[-1]["reward_mean"])
    assert summary["timings"]["samples_per_second"] > 0
    assert {"torch", "transformers", "ray"} <= summary["packages"].keys()
    assert summary["git"] is None or len(summary["git"]["commit"]) == 40  # None: not run from a clone


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    chosen = ("steps=3", f"run_dir={folder}", "checkpoint.every=2", "task.digits=1", "logging.rollouts=false")
    assert main(["train", *BARE, *chosen]) == 0
    return folder


def test_report_draws_a_finished_run(finished: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not (finished / "report").exists(), "logging.report=false"
    assert main(["report", str(finished), "--out", "drawn"]) == 0
    assert capsys.readouterr().out == "Report: drawn/index.html\n"
    assert (here / "drawn" / "index.html").stat().st_size > 10_000
    logged = {key for line in (finished / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    # The latter with weights.delta and generator.cache.
    rare = {"heldout_accuracy", "weights_changed_fraction", "cache_kl", "cache_ratio_low"}
    assert {name for panel in PANELS for name in panel.metrics} - rare - logged == set()


@pytest.mark.parametrize("trouble", [OSError("the disk is full"), ConfigError("nothing to draw.")])
@pytest.mark.more_but(every=2)
def test_a_report_that_fails_is_said_and_fails_nothing(
    trouble: Exception, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise trouble

    monkeypatch.setattr(html, "build_report", fail)
    assert main(["train", *TINY, "logging.wandb=disabled", "steps=1", "run_dir=out"]) == 0
    said = capsys.readouterr().out
    assert str(trouble) in said and "asyncrlhf report out" in said
    assert (here / "out" / "summary.json").is_file()


def test_evaluate_the_packaged_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "task.heldout_size=8", "run_dir=out"]) == 0
    table, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    result = json.loads(line)
    assert (result["model"], result["prompts"], result["failed"]) == ("tiny", 8, 0)
    assert "prompt" in table and "response" in table
    written = json.loads((here / "out" / "evaluation.json").read_text())
    assert len(written["samples"]) == 8
    graded = [float(s["response"] == s["answer"]) for s in written["samples"]]
    assert [s["reward"] for s in written["samples"]] == graded
    assert result["reward_mean"] == sum(graded) / 8


def test_evaluate_a_run_and_its_checkpoint_alike(
    finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``run=RUN`` takes the newest checkpoint and the run's own task; both ways give what the run itself measured."""
    assert main(["evaluate", f"run={finished}"]) == 0
    by_run = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = finished / "checkpoints" / "step-00000003" / "learner" / "model"
    assert main(["evaluate", f"model.path={model}", "task.digits=1", "task.heldout_size=8"]) == 0
    assert by_run == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert by_run["prompts"] == 8
    summary = json.loads((finished / "summary.json").read_text())
    assert by_run["reward_mean"] == pytest.approx(summary["heldout_accuracy"]["after"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("task=prompts", ["task=prompts names a group", "task.NAME=VALUE"]),
        ("task.heldout_siz=4", ["did you mean task.heldout_size?"]),
        ("task.heldout_size=0", ["task.heldout_size=0", ">= 1"]),
        ("nonsense", ["nonsense is not a setting"]),
    ],
)
def test_evaluate_a_run_with_nonsense(
    typed: str, words: list[str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", f"run={finished}", typed]) == 2
    said = sentence(capsys)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.in_turn
@pytest.mark.more
def test_a_sweep_has_a_folder_a_job_and_the_worst_exit_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job's reward function fails its probe; the others run to their end."""
    conf = here / "conf" / "experiment"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /algorithm: rloo\nname: mine\n")
    assert main(
        [
            "train", "-m", "--config-dir=conf", "experiment=mine", *BARE, "steps=2", "async.mode=sync,async",
            "reward.kind=python", "reward.target=cli_rewards:whole,cli_rewards:nan",
        ]
    ) == 2  # fmt: skip
    (sweep,) = (here / "runs" / "mine").iterdir()
    jobs = sorted(p.name for p in sweep.iterdir() if p.is_dir())
    assert jobs == ["0", "2"]
    for job, mode in zip(jobs, ("sync", "async"), strict=True):
        config = yaml.safe_load((sweep / job / "config.yaml").read_text())
        assert (config["async"]["mode"], config["algorithm"]["advantage"], config["name"]) == (mode, "loo", "mine")
        assert json.loads((sweep / job / "summary.json").read_text())["exit_reason"] == "done"
        assert len((sweep / job / "metrics.jsonl").read_text().splitlines()) == 2
        assert pd.read_parquet(sweep / job / "rollouts").shape[0] >= 32
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and err.count("cli_rewards:nan gives no score") == 2
    assert "async.mode=sync" in err and "async.mode=async" in err


def test_a_multirun_ends_in_one_report_of_all_and_its_folder_can_be_reported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ("logging.wandb=disabled", "steps=1", "generator.engine=fake", "name=two")
    assert main(["train", "-m", *TINY, *quiet, "seed=0,1"]) == 0
    (sweep,) = (here / "runs" / "two").iterdir()
    out = capsys.readouterr().out
    assert f"Report: {sweep}/report/index.html" in out
    assert out.index("Job 1 of 2: seed=0\n") < out.index("Job 2 of 2: seed=1\n") < out.rindex("Report:")
    assert "2 runs, drawn" in (sweep / "report" / "index.html").read_text()
    assert main(["report", str(sweep.parent), "--out", "all"]) == 0
    assert "2 runs, drawn" in (here / "all" / "index.html").read_text()


def test_an_interruption_ends_the_whole_sweep(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupted(config: Any) -> dict[str, Any]:
        started.append(config.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train", interrupted)
    assert main(["train", "-m", *BARE, "seed=5,6"]) == 130
    assert started == [5]
    assert capsys.readouterr().err == "asyncrlhf: interrupted.\n"
