"""Processes of tests, forked from one that has imported what each of them would need seconds of a processor for."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext

import psutil

from asyncrlhf.scratch import Scratch

# By names that the working folder, the repository, leads to. torch._dynamo: every optimizer of torch imports it.
IMPORTED = ["tests.unit.learner.ranks", "tests.integration.transport_process", "torch._dynamo", "deepspeed"]


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
