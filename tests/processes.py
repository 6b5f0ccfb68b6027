"""Processes of tests, forked from one that has imported what each of them would need seconds of a processor for."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrlhf.scratch import Scratch

ROOT = Path(__file__).resolve().parents[1]
# By names that the working folder, the repository, leads to. torch._dynamo: every optimizer of torch imports it.
IMPORTED = ["tests.unit.learner.ranks", "tests.integration.transport_process", "torch._dynamo", "deepspeed"]


def reports_of(module: str, *words: object, seconds: float) -> tuple[dict[str, dict[str, Any]], str]:
    """What a module of tests, run in a process of its own without this one's Ray, prints: its JSON objects by their
    ``name``, and all of it."""
    command = [sys.executable, "-m", module, *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True, start_new_session=True)
    late = False
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # Ray's processes end with their parent, or are of this session
        (out, err), late = process.communicate(), True
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if late:
        pytest.fail(f"not within {seconds:g} s: what comes after {[report['name'] for report in found]}; {err}")
    assert process.returncode == 0, out[-2000:] + err[-3000:]
    return {report["name"]: report for report in found}, out


def forked() -> ForkServerContext:
    """As ``multiprocessing.get_context("spawn")``, quicker: nothing of this process but its environment at the first
    call is inherited. The forking process has no threads and no groups, only modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def lives(pid: int) -> bool:
    """Not gone, nor ended and only waiting for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def freeze(root: psutil.Process) -> list[psutil.Process]:
    """Stop a whole tree, from its root down, until no process of it is new; returns it."""
    stopped: dict[int, psutil.Process] = {}
    while True:
        found = []
        with suppress(psutil.NoSuchProcess):
            found = [p for p in (root, *root.children(recursive=True)) if p.pid not in stopped]
        if not found:
            return list(stopped.values())
        for process in found:
            stopped[process.pid] = process
            with suppress(psutil.NoSuchProcess):
                process.suspend()


@contextmanager
def ray_files() -> Iterator[None]:
    """What a Ray that starts meanwhile writes goes with this process."""
    scratch = Scratch("r-")
    os.environ["RAY_TMPDIR"] = str(scratch.path)
    try:
        yield
    finally:
        del os.environ["RAY_TMPDIR"]
        scratch.close()
