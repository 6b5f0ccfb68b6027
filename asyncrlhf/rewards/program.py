"""Runs a program that the model wrote: in a process of its own, without network, within limits, until it ends.

It sees the machine's files read-only, except for an empty folder in memory; nothing of it is left afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import islice
from typing import IO, NamedTuple

from asyncrlhf.rewards.program_child import OUTPUT_BYTES
from asyncrlhf.rewards.reward_config import SandboxConfig
from asyncrlhf.rewards.sandbox import LOOK_SECONDS, descendants, environment

LIMITS = SandboxConfig(memory_gb=2.0, processes=16, network=False)
OWN = 2  # of the processes below ours, those that are not the program's
MOST_READ, LAST_READ = 2**20, 2**14  # bytes of what it printed, and of its errors' end
MOST_SAID = 1000  # characters of an error


class Ran(NamedTuple):
    """``text``: what the program printed, or in a few words why it failed."""

    text: str
    failed: bool


def run_program(code: str, seconds: float, limits: SandboxConfig = LIMITS) -> Ran:
    """Run Python ``code`` and wait for its end, at most ``seconds``."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(code.encode("utf-8", "replace"))
        given.seek(0)
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrlhf.rewards.program_child", str(limits.memory_gb)],
            stdin=given, stdout=out, stderr=errors, start_new_session=True,
            env={**environment(limits, os.environ), "PYTHONPATH": paths},
        )  # fmt: skip
        try:
            over = _wait(process, seconds, limits.processes)
        finally:
            with suppress(ProcessLookupError):  # its end is that of all that the program started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if max(_size(out), _size(errors)) >= OUTPUT_BYTES:
            over = over or f"it printed more than {OUTPUT_BYTES >> 20} MiB"
        if over:
            return Ran(f"the program was ended: {over}", failed=True)
        if process.returncode:
            return Ran(_failure(process.returncode, errors), failed=True)
        out.seek(0)
        return Ran(out.read(MOST_READ).decode("utf-8", "replace"), failed=False)


def _wait(process: subprocess.Popen[bytes], seconds: float, allowed: int) -> str:
    """Wait for the process's end; or why it must be ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            return ""
        if len(list(islice(descendants(process.pid), allowed + OWN + 1))) > allowed + OWN:
            return f"it started more than {allowed} processes"
    return f"it took longer than {seconds:g} s"


def _failure(code: int, errors: IO[bytes]) -> str:
    """The last line of the error, or else how the program ended."""
    errors.seek(max(0, _size(errors) - LAST_READ))
    lines = [line for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if code == 1 and lines:
        return lines[-1].strip()[:MOST_SAID]
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        return f"the program was ended by {signal.Signals(number).name}"
    return f"the program ended with exit code {code}"


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
