"""Notices that the machine goes soon (SIGTERM, SIGUSR1, SIGUSR2, a file): a checkpoint in time, and no step lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.start import interruption
from asyncrlhf.records.read.verify import verify
from tests.integration.test_parent import LOCAL, started, wait_for
from tests.loop import FAKE, QUIET, run
from tests.processes import lives

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; -1 without one."""
    return max((int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoints/step-*")), default=-1)


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose fourth step never ends. It signals itself as ``NUMBER`` says."""
    train = LearnLoop._train

    async def standing(self: LearnLoop, *arguments: Any) -> Any:
        if self.state.version == 3:
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
            await asyncio.sleep(1e5)
        return await train(self, *arguments)

    monkeypatch.setattr(LearnLoop, "_train", standing)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_step_that_takes_longer_than_the_notice_is_given_up(
    stands: None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBER", str(int(number)))
    words = [*FAKE, *QUIET, "runtime=local", f"run_dir={tmp_path}", "logging.progress=plain"]
    assert main(["train", *words, "checkpoint.every=2", "checkpoint.notice_seconds=7"]) == 128 + number
    said = " ".join(capsys.readouterr().out.split())
    assert "writing a checkpoint within checkpoint.notice_seconds=7." in said
    assert "step 3 could be written within checkpoint.notice_seconds=7; the newest one is of step 2." in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"] == "interrupted" and newest(tmp_path) == 2
    assert not (tmp_path / "error.txt").exists() and verify(tmp_path) == []


def test_who_presses_ctrl_c_waits_longer_than_a_notice(
    stands: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBER", str(int(signal.SIGINT)))
    words = [*FAKE, *QUIET, "runtime=local", f"run_dir={tmp_path}", "stall_timeout_seconds=50"]
    assert main(["train", *words, "logging.progress=plain"]) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert "within stall_timeout_seconds=50" in said and "notice_seconds" not in said


def test_a_file_ends_a_run_in_order_and_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "LOOK_SECONDS", 0.02)
    step, file = LearnLoop._step, tmp_path / "stop"

    async def asked(self: LearnLoop, *arguments: Any) -> None:
        if self.state.version == 3:
            file.touch()
            while not self.state.stopping:  # the clock is virtual, the file is not
                await asyncio.sleep(1e-6)
        await step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LearnLoop, "_step", asked)
        done = run(tmp_path, *FAKE, "steps=8")
    assert done.summary["exit_reason"] == "interrupted" and newest(tmp_path) == 4 and not file.exists()
    assert run(tmp_path, *FAKE, "steps=8", "checkpoint.resume=auto").summary["exit_reason"] == "done"


def test_a_file_that_waited_for_the_run_ends_it_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *FAKE, "steps=100000")
    assert not (tmp_path / "stop").exists() and newest(tmp_path) == -1


@pytest.mark.thorough
def test_no_attempt_follows_a_notice(tmp_path: Path) -> None:
    with started(tmp_path, *LOCAL, "steps=100000", "restarts=3") as command:
        command.until(6)
        (command.run_dir / "stop").touch()
        code, said = command.end()
        assert code == 130 and newest(command.run_dir) == command.steps(), said


@pytest.mark.thorough
def test_a_warning_to_all_processes_of_a_job_ends_the_run_alone(tmp_path: Path) -> None:
    """SLURM sends it to every process of a job's step, Ray's among them, which it would end."""
    with started(tmp_path, *FAKE, *QUIET, "steps=100000") as command:
        below = command.until(4).children(recursive=True)
        for process in [psutil.Process(command.process.pid), *psutil.Process(command.process.pid).children(True)]:
            process.send_signal(signal.SIGUSR1)
        code, said = command.end()
        assert code == 128 + signal.SIGUSR1 and command.reason == "interrupted", said
        assert newest(command.run_dir) == command.steps(), "no step was lost"
        wait_for(lambda: not any(lives(process.pid) for process in below), "end of Ray's processes")


@pytest.mark.more
@pytest.mark.parametrize(
    ("runtime", "seed", "notices"),
    [
        pytest.param(runtime, seed, notices, marks=[] if (runtime, seed) == ("local", 0) else [pytest.mark.thorough])
        for runtime, seed, notices in (
            *(("ray", seed, 1 + (seed > 0)) for seed in range(5)),
            ("local", 5, 3),
            ("local", 6, 8),
        )
    ],
)
def test_notices_cost_no_step(runtime: str, seed: int, notices: int, tmp_path: Path) -> None:
    """The run ends within the notice each time, and the next attempt goes on where it ended."""
    draw, before = random.Random(seed), 0
    options = (*FAKE, *QUIET, "steps=100000", "checkpoint.resume=auto", f"runtime={runtime}")
    for place in range(notices):
        with started(tmp_path, *options) as command:
            own = command.until(before + draw.randint(1, 4))
            number = 0 if place % 3 == 2 else draw.choice(NOTICES)
            if number:
                os.kill((own.pid, command.process.pid)[place % 3], number)
            else:
                (command.run_dir / "stop").touch()
            code, said = command.end()
            assert code == 128 + (number or signal.SIGINT) and command.reason == "interrupted", said
            assert before < newest(command.run_dir) == command.steps(), "no step was lost"
            before = newest(command.run_dir)
    assert verify(tmp_path / "run") == []
