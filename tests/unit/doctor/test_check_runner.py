"""Checks of ``asyncrlhf doctor --gpu`` that hang, fail or have no time left; a runner that is killed among them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from asyncrlhf.doctor import check_runner
from asyncrlhf.doctor.check_runner import Call, Check, Result, Runner, TooSlowError, figures_of, output
from tests.processes import lives

HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(100)
"""


def check(name: str, *words: str, limit: float = 30.0) -> Check:
    return Check(name, "", 1, words=words or (name,), limit=limit)


def started(programs: Mapping[str, str]) -> Call:
    """Checks by these names run these programs, with the further words of the check."""

    def call(command: Sequence[str], limit: float) -> str:
        name, *rest = command[3:]
        return output([sys.executable, "-c", programs[name], *rest], limit)

    return call


def test_a_check_that_hangs_is_killed_with_all_that_it_started_and_the_later_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_runner, "GRACE_SECONDS", 0.2)
    programs = {"hangs": HANGS, "answers": "print('{\"seconds\": 2.0}')", "fails": "raise SystemExit('no memory')"}
    kept: list[list[str]] = []
    lines: list[str] = []
    checks = [check("hangs", "hangs", str(tmp_path / "pid"), limit=2.0), check("fails"), check("answers")]
    runner = Runner(
        (), lambda _: "", tell=lines.append, keep=lambda rs: kept.append([r.state for r in rs]), call=started(programs)
    )
    began = time.monotonic()
    hangs, fails, answers = runner.run(checks)
    assert time.monotonic() - began < 15
    assert (hangs.state, hangs.sentence) == ("failed", "did not end within 2 s and was killed.")
    assert (fails.state, fails.sentence) == ("failed", "ended with exit code 1: no memory")
    assert answers.state == "passed" and answers.figures == {"seconds": 2.0}
    assert kept == [["failed"], ["failed", "failed"], ["failed", "failed", "passed"]]
    assert [line[:15] for line in lines] == ["[1/3] failed   ", "[2/3] failed   ", "[3/3] passed   "]
    assert not lives(int((tmp_path / "pid").read_text()))


@pytest.mark.more
def test_an_interrupted_runner_ends_its_check(tmp_path: Path) -> None:
    """By Ctrl-C: the process of the check is not left to itself."""
    code = "from asyncrlhf.doctor.check_runner import output; output(['sleep', '100'], 100)"
    runner = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    own = psutil.Process(runner.pid)
    while not (children := own.children()) or children[0].name() != "sleep":
        assert runner.poll() is None
        time.sleep(0.05)
    # Until Popen has returned in the runner, which then looks at the check again and again, no one would end the check.
    begun = own.num_ctx_switches().voluntary
    while own.num_ctx_switches().voluntary < begun + 5:
        assert runner.poll() is None
        time.sleep(0.05)
    runner.send_signal(signal.SIGINT)
    runner.wait(20)
    assert not lives(children[0].pid)


KILLED = """
import os, signal, sys
from functools import partial
from pathlib import Path
import torch
from asyncrlhf.doctor import gpu_check
from asyncrlhf.doctor.check_runner import Check, Runner

def call(command, limit):
    if "second" in command and sys.argv[2] == "check":
        os.kill(os.getpid(), signal.SIGKILL)
    return '{"seconds": 3.0}'

def half(descriptor):
    text = Path(f"/proc/self/fd/{descriptor}").read_bytes()
    if b'"second"' in text:
        os.ftruncate(descriptor, len(text) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "write":
    os.fsync = half
torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_name = lambda: True, lambda: 1, lambda i: "H200"
gpu_check.CHECKS = tuple(Check(name, "", 1, words=(name,), quick=True) for name in ("first", "second", "third"))
gpu_check.Runner = partial(Runner, call=call)
gpu_check.run(Path(sys.argv[1]), quick=True)
"""


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("moment", ["check", "write"])
def test_a_runner_killed_in_the_second_leaves_the_first_in_the_file_and_on_the_terminal(
    moment: str, tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    (temporary := tmp_path / "temporary").mkdir()
    command, env = [sys.executable, "-c", KILLED, str(out), moment], {**os.environ, "TMPDIR": str(temporary)}
    env.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    kept = json.loads(out.read_text())
    assert [(row["name"], row["state"], row["figures"]) for row in kept["checks"]] == [
        ("first", "passed", {"seconds": 3.0})
    ]
    assert kept["planned"] == 3
    assert done.stdout.startswith("[1/3] passed   first")  # flushed, although no terminal reads it


class Clock:
    """Seconds that pass only in the processes that it imitates: each takes ``seconds`` or is killed at its limit."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 1000.0, seconds

    def __call__(self) -> float:
        return self.now

    def call(self, command: Sequence[str], limit: float) -> str:
        if self.seconds > limit:
            self.now += limit + check_runner.GRACE_SECONDS
            raise TooSlowError(f"did not end within {limit:g} s and was killed.")
        self.now += self.seconds
        return "{}"


def spend(seconds: float, budget: float) -> tuple[list[Result], float]:
    """The results of 12 checks that take so long each, and the seconds of all."""
    clock = Clock(seconds)
    ends = clock.now + budget
    checks = [check(f"{number}", limit=40.0) for number in range(12)]
    runner = Runner((), lambda _: "", ends, tell=lambda _: None, call=clock.call, clock=clock)
    return runner.run(checks), clock.now - 1000.0


@pytest.mark.parametrize("seconds", [1.0, 17.0, 30.0, 39.0, 1000.0])
def test_the_budget_holds_and_what_it_leaves_out_says_so(seconds: float) -> None:
    results, spent = spend(seconds, budget=175.0)
    assert spent <= 175 and len(results) == 12
    states = [result.state for result in results]
    assert states == sorted(states, key=["passed", "failed", "not run"].index)
    if seconds == 1.0:
        assert states == ["passed"] * 12
        return
    assert states[-1] == "not run" and results[-1].sentence == "no time left." and results[-1].seconds == 0
    assert 175 - spent < max(40.0, check_runner.LEAST_SECONDS + check_runner.GRACE_SECONDS), "it is used"
    cut = [result for result in results if result.sentence.startswith("no time left: did not end within")]
    assert all(result.state == "not run" and 0 < result.seconds <= 45 for result in cut) and len(cut) <= 1
    assert states.count("failed") == (3 if seconds == 1000.0 else 0), "only a whole limit is a failure"


def test_without_a_budget_every_check_has_its_limit() -> None:
    results, spent = spend(39.0, math.inf)
    assert [result.state for result in results] == ["passed"] * 12 and spent == 12 * 39


def test_records_that_do_not_hold_fail_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_runner, "verify", lambda folder: ["rollout 3 was trained twice."])
    with pytest.raises(RuntimeError, match="do not hold: rollout 3"):
        figures_of(tmp_path)
