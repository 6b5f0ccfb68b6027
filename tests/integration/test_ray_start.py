"""Workers of a Ray that this project starts: each driver gets its own, and a start in which none comes up ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop import FAKE, QUIET

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120  # many times what the run takes
# Workers that never register with Ray, which once waited for them in ray.init without a limit.
SILENT = """
import sys
from asyncrlhf.cluster import forked_workers
from asyncrlhf.cli.main import main

forked_workers.COMMAND = '''#!/bin/sh
case "$*" in *default_worker.py*) exec sleep 300;; esac
exec {python} "$@"
'''
sys.exit(main(["train", *sys.argv[1:]]))
"""

DRIVER = """
import sys
import ray
from asyncrlhf.cluster.own_ray import init

init(address=sys.argv[1], log_to_driver=False)
job = ray.remote(lambda: ray.get_runtime_context().get_job_id())
print(ray.get_runtime_context().get_job_id(), *ray.get([job.remote() for _ in range(2)], timeout=60))
"""


KEEPER = """
import subprocess, sys
from asyncrlhf.cluster.own_ray import OwnRay

own = OwnRay(2, 100 * 2**20)
for _ in range(2):
    subprocess.run([sys.executable, "-c", sys.argv[1], own.address], check=True)
own.stop()
"""


ON_GPUS = """
import os, sys
import ray
from asyncrlhf.cluster.own_ray import OwnRay

@ray.remote(num_gpus=1, num_cpus=0)
class Part:
    def facts(self):
        return os.getppid(), os.environ["CUDA_VISIBLE_DEVICES"], "asyncrlhf.actors.learner" in sys.modules

own = OwnRay(2, 100 * 2**20, num_gpus=2)
facts = ray.get([part.facts.remote() for part in [Part.remote(), Part.remote()]], timeout=60)
for parent, device, imported in facts:
    print(int(parent == own._workers.server.pid), device, int(imported))
own.stop()
"""


@pytest.mark.in_turn
@pytest.mark.more
def test_actors_on_gpus_are_forks_and_see_their_own_device_only() -> None:
    # Ray counts the GPUs that it is told of; the machine needs none.
    command = [sys.executable, "-c", ON_GPUS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert sorted(done.stdout.splitlines()) == ["1 0 1", "1 1 1"], done.stderr[-1500:]


@pytest.mark.thorough
def test_each_driver_of_one_ray_gets_workers_of_its_own_job() -> None:
    command = [sys.executable, "-c", KEEPER, DRIVER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    jobs = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [len(set(job)) for job in jobs] == [1, 1], done.stderr[-1500:]
    assert jobs[0] != jobs[1]


@pytest.mark.thorough
def test_workers_that_never_come_up_end_the_start_within_its_limit(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path}", *FAKE, *QUIET, "cluster.start_timeout_seconds=3"]
    done = subprocess.run(
        [sys.executable, "-c", SILENT, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1 and "did not start within 3 s" in done.stderr.splitlines()[-1], done.stderr
    assert "did not start within 3 s" in json.loads((tmp_path / "summary.json").read_text())["exit_reason"]
