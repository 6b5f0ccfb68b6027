"""`bench soak` finds the process that grows, and neither one that grew at its start nor one that fluctuates."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ray_run import wait_until

soak = importlib.import_module("experiments.29_soak.bench")

MIB = 2**20


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["ray::LearnerActor.call"], "LearnerActor"),
        (["/site-packages/ray/gcs/gcs_server", "--log_dir=x"], "gcs_server"),
        (["/usr/bin/python3.11", "-m", "asyncrlhf.rewards.sandbox_child", "7"], "asyncrlhf.rewards.sandbox_child"),
        (["python", "-u", "/ray/dashboard/agent.py"], "agent.py"),
    ],
)
def test_processes_go_by_what_they_are(words: list[str], name: str) -> None:
    assert soak.name_of(words) == name


def test_growth_is_that_of_the_second_half(capsys: pytest.CaptureFixture[str]) -> None:
    rng, samples = np.random.default_rng(0), []
    for step in range(50, 2001, 50):
        samples.append(
            (
                step,
                {
                    "leaks (1)": (100 + 0.03 * step + rng.normal(), 40),
                    "warms up (2)": (100 + 50 * min(1.0, step / 500) + rng.normal(), 40),
                    "opens files (3)": (100 + rng.normal(), 40 + step // 100),
                }
                | ({"came late (4)": (float(step), 1)} if step > 1500 else {}),
            )
        )
    processes = {name: soak.growth(points) for name, points in soak.by_process(samples).items()}
    assert processes["leaks (1)"]["mib_per_1000"] == pytest.approx(30, abs=2)
    assert processes["warms up (2)"]["mib_per_1000_first_half"] > 20
    assert "came late (4)" not in processes
    soak.show(processes)
    assert capsys.readouterr().out.splitlines()[-1].endswith("second half: leaks (1), opens files (3)")


def test_growth_among_processes_that_are_replaced_is_that_within_each() -> None:
    """Each warms up to a size of its own, and grows slowly from there: neither their sizes nor their starts count."""
    samples = []
    for step in range(50, 6001, 50):
        number, age = divmod(step, 1000)
        warm = 40 * min(1.0, age / 200) if number else 40
        samples.append((step, {f"learner ({number})": (100 + 5 * number + warm + 0.002 * age, 40 + number)}))
    (name, points), *others = soak.by_process(samples, struck=True).items()
    assert name == "learner" and not others
    found = soak.growth(points)
    assert found["mib_per_1000"] == pytest.approx(2.0, abs=0.01) and found["files_per_1000"] == 0
    assert found["mib_per_1000_first_half"] == pytest.approx(2.0, abs=0.01)


def test_lines_are_counted_also_when_a_run_goes_on_from_an_earlier_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = soak.Lines(path)
    assert lines.new() == 0
    path.write_text("a\n" * 5)
    assert (lines.new(), lines.count) == (5, 5)
    path.write_text("a\n" * 3)
    assert (lines.new(), lines.count) == (0, 3)
    path.write_text("a\n" * 7)
    assert (lines.new(), lines.count) == (4, 7)


FAMILY = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
while True:
    print([child.poll() for child in children].count(None), flush=True)
    time.sleep(0.05)
"""


def test_a_strike_kills_one_process_of_that_name_alone() -> None:
    """Below a command of its own: this process may have a Ray below it that other tests go on with."""
    name = Path(sys.executable).name
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as family:
        assert family.stdout is not None
        try:
            wait_until(lambda: [n for n, _ in soak.processes_of(family.pid)] == ["parent", name, name], "both")
            assert soak.strike(family.pid, "gcs_server") == ""
            assert soak.strike(family.pid, name) == name
            lines = iter(family.stdout)
            wait_until(lambda: next(lines).strip() == "1", "the end of one")
        finally:
            for _, process in list(soak.processes_of(family.pid)):
                process.kill()


def test_a_look_sees_memory_and_files_of_the_whole_tree() -> None:
    program = (
        f"held = b'x' * (64 * {MIB}); files = [open('/dev/null') for _ in range(50)]; print(1, flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        seen = soak.look(os.getpid())
        assert f"parent ({os.getpid()})" in seen
        mib, files = next(facts for name, facts in seen.items() if name.endswith(f"({child.pid})"))
        assert 64 < mib < 200 and 50 < files < 80
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not any(name.endswith(f"({child.pid})") for name in soak.look(os.getpid())), "its end")
