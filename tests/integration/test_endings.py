"""How runs end early: signals at any moment, a second process in the folder, first causes, a closed terminal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.cli.main import COMMANDS, TRACES, main
from asyncrlhf.cluster.local_runtime import LocalRuntime
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator import run as run_module
from asyncrlhf.orchestrator.controller import Controller
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.records.write.run_lock import RunLock
from tests.loop import FAKE, run

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def signalled(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, *numbers: int, call: int = 1) -> None:
    """Send this process ``numbers`` at the beginning of the ``call``-th call of an asynchronous method, which then
    hangs for hours of the run's clock."""
    original, calls = getattr(owner, method), []

    async def struck(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
            await asyncio.sleep(1e5)
        return await original(self, *arguments)

    monkeypatch.setattr(owner, method, struck)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/step-*"))


@pytest.fixture(autouse=True)
def handlers_are_as_before() -> Any:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_any_first_signal_ends_a_run_with_a_checkpoint_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    step = LearnLoop._step

    async def struck(self: LearnLoop, *arguments: Any) -> None:
        if self.state.version == 3:
            os.kill(os.getpid(), number)
        await step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LearnLoop, "_step", struck)
        done = run(tmp_path, *FAKE, "steps=8")
    assert done.summary["exit_reason"] == "interrupted"
    assert checkpoints(tmp_path) == ["step-00000004"]
    if number == signal.SIGINT:
        again = run(tmp_path, *FAKE, "steps=8", "checkpoint.resume=auto")
        assert again.summary["exit_reason"] == "done" and again.summary["ledger"]["trained"] == 8 * 16


def test_a_signal_while_the_run_starts_ends_it_and_says_that_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled(monkeypatch, LocalRuntime, "start", signal.SIGTERM)
    words = [*FAKE, f"run_dir={tmp_path}", "runtime=local", "logging.wandb=disabled", "logging.progress=plain"]
    assert main(["train", *words]) == 128 + signal.SIGTERM
    said = capsys.readouterr()
    assert "no step was trained, and no checkpoint is written" in " ".join(said.out.split())
    assert said.err == "asyncrlhf: interrupted.\n"
    assert summary_of(tmp_path)["exit_reason"] == "interrupted" and checkpoints(tmp_path) == []
    assert run(tmp_path, *FAKE, "steps=1").summary["exit_reason"] == "done", "the folder is free and unused"


def test_a_resume_that_a_signal_ends_in_its_start_keeps_every_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*FAKE, "learner.virtual_step_seconds=1", "checkpoint.every=2", "checkpoint.resume=auto")
    run(tmp_path, *options, "steps=4")
    signalled(monkeypatch, LocalRuntime, "start", signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *options, "steps=8")
    assert verify(tmp_path) == []


@pytest.mark.in_turn
@pytest.mark.parametrize(("call", "step"), [(1, 0), (2, 2), (3, 4)], ids=["the first", "one under way", "the last"])
@pytest.mark.more_but("one under way")
def test_a_signal_in_an_evaluation_gives_it_up_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, step: int
) -> None:
    options = (*FAKE, "steps=4", "eval_every=2", "checkpoint.every=0")
    with monkeypatch.context() as patch:
        signalled(patch, HeldOut, "measure", signal.SIGTERM, call=call)
        done = run(tmp_path, *options)
    assert done.summary["exit_reason"] == "interrupted"
    assert checkpoints(tmp_path) == [f"step-{step:08d}"]
    again = run(tmp_path, *options, "checkpoint.resume=auto")
    again.assert_ledger_whole()
    assert again.summary["exit_reason"] == "done" and again.summary["ledger"]["trained"] == 4 * 16


def test_a_second_signal_of_whatever_kind_ends_a_hung_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled(monkeypatch, LearnLoop, "_step", signal.SIGTERM, signal.SIGTERM, call=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *FAKE, "steps=8")
    assert summary_of(tmp_path)["exit_reason"] == "interrupted" and checkpoints(tmp_path) == []


HOLD = "import sys, time; from pathlib import Path; from asyncrlhf.records.write.run_lock import RunLock\n"
HOLD += "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_free(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as refused:
            run(tmp_path, *FAKE, "steps=1")
        assert f"{tmp_path} is being written by process {owner.pid} on " in str(refused.value)
        assert "give another run_dir" in str(refused.value)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"], "the refused run wrote nothing"
        os.kill(owner.pid, signal.SIGSTOP)  # a frozen owner is no dead one
        with pytest.raises(ConfigError):
            RunLock(tmp_path)
        owner.kill()
    RunLock(tmp_path).release()
    assert run(tmp_path, *FAKE, "steps=1").summary["exit_reason"] == "done"


CLOSES = {
    "the loops": (Controller, "close"),
    "the parts": (LocalRuntime, "close"),
    "the summary": (run_module, "attempts"),
    "the records": (RunRecorder, "finish"),
}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("what", "error"),
    [
        *((what, KeyError) for what in CLOSES),
        ("the loops", asyncio.CancelledError),
        ("the parts", asyncio.CancelledError),
    ],
)
@pytest.mark.more_but(every=3)
def test_clean_up_that_fails_or_is_cancelled_hides_no_cause(
    what: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    finish = RunRecorder.finish

    def failing(*given: Any) -> Any:
        if what == "the records":
            finish(*given)  # the summary is written, and then
        raise error("second")

    async def breaking(*_: Any) -> None:
        failing()

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("first")

    monkeypatch.setattr(LearnLoop, "_step", broken)
    monkeypatch.setattr(*CLOSES[what], failing if what in ("the summary", "the records") else breaking)
    words = [*FAKE, f"run_dir={tmp_path}", "runtime=local", "logging.wandb=disabled", "logging.progress=none"]
    assert main(["train", *words]) == 1
    trace = tmp_path / "error.txt"
    assert capsys.readouterr().err == f"asyncrlhf: ZeroDivisionError: first. The trace is in {trace}.\n"
    assert summary_of(tmp_path)["exit_reason"] == "failed: ZeroDivisionError: first"
    text = trace.read_text()
    assert text.index("ZeroDivisionError: first") < text.index("second") and "in broken" in text
    monkeypatch.undo()
    assert main(["status", str(tmp_path)]) == 0 and "ZeroDivisionError: first" in capsys.readouterr().out
    if what == "the records":
        assert run(tmp_path, *FAKE, "steps=1").summary["exit_reason"] == "done"
        assert not trace.exists(), "a run that is done shows no error of the attempt before"


def test_traces_of_errors_outside_a_run_stay_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(COMMANDS, "verify", ("operator", "truediv"))  # called with one argument: a TypeError
    for _ in range(TRACES + 3):
        assert main(["verify"]) == 1
    left = [str(path) for path in tmp_path.iterdir()]
    assert len(left) == TRACES
    last = capsys.readouterr().err.splitlines()[-1]
    assert any(last.endswith(f"The trace is in {name}.") for name in left), last


@pytest.mark.thorough
def test_a_terminal_that_closes_ends_no_run(tmp_path: Path) -> None:
    options = " ".join((*FAKE, "runtime=local", "steps=4", "logging.wandb=disabled", "logging.progress=plain"))
    command = f"{sys.executable} -m asyncrlhf train {options} run_dir={tmp_path}/run | head -1; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr and "Broken" not in done.stderr
    assert summary_of(tmp_path / "run")["exit_reason"] == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_imports_ends_in_a_word_and_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "asyncrlhf", "train", "runtime=local", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "Loading PyTorch" in process.stdout.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 128 + number and said.splitlines()[-1] == "asyncrlhf: interrupted.", said
