"""Processes of tests, forked from one that has imported what each of them would need seconds of a processor for."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
