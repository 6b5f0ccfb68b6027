"""`bench soak` finds the process that grows, and neither one that grew at its start nor one that fluctuates."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

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


def test_a_look_sees_memory_and_files_of_the_whole_tree() -> None:
    program = (
        f"held = b'x' * (64 * {MIB}); files = [open('/dev/null') for _ in range(50)]; print(1, flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        seen = soak.look(os.getpid())
        assert f"driver ({os.getpid()})" in seen
        mib, files = next(facts for name, facts in seen.items() if name.endswith(f"({child.pid})"))
        assert 64 < mib < 200 and 50 < files < 80
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not any(name.endswith(f"({child.pid})") for name in soak.look(os.getpid())), "its end")
