"""Runs the checks of ``asyncrlhf doctor --gpu`` one after another, each in a process of its own with a time limit, and
all within a budget of seconds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.scratch import Scratch

LIMIT_SECONDS = 40.0  # of one check
GRACE_SECONDS = 5.0  # from the signal that asks a process to end until it is killed
LEAST_SECONDS = 10.0  # no check starts with less left: the imports alone take most of it
State = Literal["passed", "failed", "not run"]
Call = Callable[[Sequence[str], float], str]  # a command and its limit in seconds; returns what it printed


class TooSlowError(RuntimeError):
    """A process was killed at its limit."""


@dataclass(frozen=True)
class Check:
    """``cards``: GPUs that it needs. ``words``: of :mod:`asyncrlhf.doctor.gpu_parts`, with ``{folder}`` for a folder
    that the checks share; without them ``overrides`` are those of a run of the checkpoint ``model`` in that folder.
    ``limit``: in seconds. ``quick``: part of ``--quick``."""

    name: str
    proves: str
    cards: int
    model: str = ""
    overrides: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    vllm: bool = False
    quick: bool = False
    limit: float = LIMIT_SECONDS


@dataclass(frozen=True)
class Result:
    """``figures``: by name, in seconds, bytes, tokens, FLOP/s and shares. ``kernels``: as
    :func:`asyncrlhf.doctor.kernels.table` returns them. ``sentence``: why it failed or was not run."""

    name: str
    proves: str
    state: State
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    sentence: str = ""


def output(command: Sequence[str], limit: float) -> str:
    """What the process printed. RuntimeError with its last line if it fails, TooSlowError if it does not end within
    ``limit`` seconds; no process that it started is left then."""
    # Files, because a pipe has no end while a process that outlives the command holds it.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=said, stderr=errors, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise TooSlowError(f"did not end within {limit:.3g} s and was killed.") from None
        finally:
            _end(process)
        said.seek(0)
        errors.seek(0)
        out = said.read()
        if process.returncode:
            words = (errors.read().strip() or out.strip()).splitlines()
            raise RuntimeError(f"ended with exit code {process.returncode}: {words[-1] if words else 'no word'}")
    return out


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: what lives on would hold memory of the devices."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)  # also those that left its group
        process.terminate()  # a run ends in order, and its actors with it
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class Runner:
    """``common``: overrides of every run. ``left_out``: why a check is not to run, or nothing. ``ends``: when the
    budget ends, on ``clock``. ``keep`` is given all results so far after each check, ``tell`` a line about it."""

    common: Sequence[str]
    left_out: Callable[[Check], str]
    ends: float = math.inf
    tell: Callable[[str], None] = lambda line: print(line, flush=True)
    keep: Callable[[Sequence[Result]], None] = lambda results: None
    call: Call = output
    clock: Callable[[], float] = time.monotonic

    def run(self, checks: Sequence[Check]) -> list[Result]:
        results: list[Result] = []
        with closing(Scratch("asyncrlhf-gpu-")) as shared:
            for check in checks:
                started = self.clock()
                written = {result.name for result in results if result.state == "passed"}
                state, answer = self._outcome(check, shared.path, written)
                results.append(Result(check.name, check.proves, state, self.clock() - started, **answer))
                self.keep(results)
                self.tell(f"[{len(results)}/{len(checks)}] {line(results[-1])}")
        return results

    def _outcome(self, check: Check, folder: Path, passed: Set[str]) -> tuple[State, Mapping[str, Any]]:
        """The state, and fields of the result. ``passed``: names of earlier checks."""
        left = self.ends - GRACE_SECONDS - self.clock()
        why = self.left_out(check)
        if not why and check.model and f"model {check.model}" not in passed:
            why = f"needs the checkpoint of the check model {check.model}, which did not pass."
        if not why and left < LEAST_SECONDS:
            why = "no time left."
        if why:
            return "not run", {"sentence": why}
        try:
            return "passed", self._measured(check, folder, min(check.limit, left))
        except TooSlowError as error:
            if left < check.limit:
                return "not run", {"sentence": f"no time left: {error}"}
            return "failed", {"sentence": str(error)}
        except (RuntimeError, ConfigError, OSError, ValueError) as error:
            return "failed", {"sentence": str(error)}

    def _measured(self, check: Check, folder: Path, limit: float) -> Mapping[str, Any]:
        if check.words:
            words = [word.replace("{folder}", str(folder)) for word in check.words]
            said = self.call([sys.executable, "-m", "asyncrlhf.doctor.gpu_parts", *words], limit)
            figures = json.loads("".join(said.splitlines()[-1:]))  # libraries may print before
            return {"kernels": figures.pop("kernels", {}), "figures": figures}
        run_dir = folder / check.name
        own = (f"model.path={folder}/model-{check.model}", f"run_dir={run_dir}")
        self.call([sys.executable, "-m", "asyncrlhf", "train", *self.common, *own, *check.overrides], limit)
        return {"figures": figures_of(run_dir)}


def figures_of(run_dir: Path) -> dict[str, float]:
    """Medians over a run's steps after the second; RuntimeError if its records break a guarantee."""
    if broken := verify(run_dir):
        raise RuntimeError(f"the records do not hold: {broken[0]}")
    rows = read_metrics(run_dir / "metrics.jsonl")[2:]
    names = {
        "tokens_per_second": "tokens_per_second", "publish_seconds": "weight_sync_seconds",
        "snapshot_seconds": "snapshot_seconds", "train_seconds": "train_seconds", "idle": "learner_idle_fraction",
        "mismatch_kl": "mismatch_kl",
    }  # fmt: skip
    found = {name: [row[key] for row in rows if row.get(key) is not None] for name, key in names.items()}
    return {name: statistics.median(values) for name, values in found.items() if values}


def line(result: Result) -> str:
    """The result in one line."""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    return f"{result.state:8} {result.name:16} {result.seconds:5.1f} s  {figures or result.sentence}"
