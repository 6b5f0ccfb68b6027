"""The process above a command's own: it outlives it, says what killed it, and ends what it left behind.

A command runs in a child, forked before anything heavy is imported. Its parent only waits. A child that ends in order
says so with its exit code. If it cannot (Ray ends its process, the kernel kills it for memory, a library crashes), the
parent says in one sentence what died, closes the run's files, and ends every process that descends from the child.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncrlhf import last_words
from asyncrlhf.shortages import memory_kills

PARENT_DEATH, SUBREAPER = 1, 36  # of prctl(2)
LEFT_SECONDS = 10.0  # for the child's processes to end after SIGKILL
MOST_IDLE = 2  # attempts in a row without a step, after which none follows
LONGEST_BACKOFF = 60.0  # seconds before an attempt; the first follows after one
REFUSED = 2  # exit code for a wrong setting, or a cluster that cannot hold the run
KNOCK_SECONDS = 5.0  # between two looks for a cluster that is away
ENDS = (0, REFUSED, *(128 + number for number in last_words.ENDING))  # exit codes after which no attempt follows
LOOK_SECONDS = 1.0  # between two looks at the processes that the child needs
GRACE_SECONDS = 5.0  # in which a child that lost one may end by itself
RECORD = re.compile(r"\[\S+ \S+ (?P<severity>[A-Z]) \d+ \d+\] (?:\([^)]*\) )?\S+: (?P<text>.*)")  # of a log of Ray's
TAIL = 1 << 16  # bytes of its end that are read
NEEDED = {"gcs_server": "its control store (gcs_server)", "raylet": "its node process (raylet)"}


def above(command: Callable[[Sequence[str]], int], restarts: int | None) -> int:
    """Call ``command`` in a child and return its exit code; in the child, what it returned. ``command`` takes further
    overrides, with which it goes on where an attempt before ended. ``restarts``: of an attempt that dies before it has
    read its settings; None: it cannot go on.

    The caller is a process of one thread. Where a process cannot be forked, ``command`` is called in this one.
    """
    if not (sys.platform == "linux" and threading.active_count() == 1):
        return command(())
    _prctl(SUBREAPER, 1)
    heeded = [number for number in last_words.PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*heeded, signal.SIGCHLD})
    further: list[str] = []
    spent = idle = 0  # restarts since the last that made steps, and attempts without a step, in a row
    steps, cluster = 0, ""
    while True:
        kills = memory_kills()
        watched = _fork(partial(command, further), before)
        if watched is None:
            return last_words.ended_with()
        status = watched.wait({*heeded, signal.SIGCHLD}, heeded)
        told = watched.told
        code = int(told["ended"]) if "ended" in told else speak_for(status, watched, memory_kills() > kills)
        left = told.get("restarts", restarts if "ended" not in told else 0)
        cluster = told.get("cluster", cluster)
        partial_cluster = code == REFUSED and cluster and steps  # what it lacks now it had in an attempt before
        if restarts is None or not left or (code in ENDS and not partial_cluster):
            return code
        now = _steps(Path(told["run_dir"])) if "run_dir" in told else steps
        spent, idle = (1, 0) if now > steps else (spent + 1, idle + (not partial_cluster))
        steps = max(steps, now)
        if idle >= MOST_IDLE or spent > left:
            why = f"{idle} attempts made no step" if idle >= MOST_IDLE else f"restarts={left} are spent"
            return _said(f"no further attempt, since {why}", code)
        seconds = min(LONGEST_BACKOFF, 2.0 ** (spent if partial_cluster else idle))
        saved = "run_dir" in told and any(Path(told["run_dir"]).glob("checkpoints/step-*"))
        where = "from its newest checkpoint" if saved else "from its start"
        _said(f"the next attempt begins in {seconds:g} s, {where}", code)
        got = signal.sigtimedwait(heeded, seconds)
        if got is None and cluster and not _listens(cluster):
            _said(f"waiting for the Ray cluster at {cluster}", code)
            while got is None and not _listens(cluster):
                got = signal.sigtimedwait(heeded, KNOCK_SECONDS)
        if got is not None:
            return _said("interrupted", 128 + got.si_signo)
        if "run_dir" in told:
            further = ["checkpoint.resume=auto", f"run_dir={told['run_dir']}"]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
        return True
    return False


def _said(sentence: str, code: int) -> int:
    print(f"asyncrlhf: {sentence}.", file=sys.stderr, flush=True)
    return code


def _fork(command: Callable[[], int], mask: Iterable[int]) -> _Watched | None:
    """Call ``command`` in a child, whose signals are blocked as ``mask`` says; None in the child, when it has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(writing)
        return _Watched(child, reading)
    os.close(reading)
    _prctl(PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    _prctl(SUBREAPER, 0)
    last_words.below(writing)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    last_words.tell(ended=command())
    return None


class Told:
    """What a process tells by a pipe, and the first process that it needs and has lost."""

    def __init__(self, reading: int) -> None:
        os.set_blocking(reading, False)
        self._reading, self._rest = reading, b""
        self.told: dict[str, Any] = {}
        self.lost = ""
        self._lost_at = 0.0
        self.hung = False  # it was ended, since it did not say so

    def read(self) -> bool:
        """Take what it has told; returns whether it may tell more."""
        part = b"more"
        with suppress(BlockingIOError):
            while part := os.read(self._reading, 1 << 16):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self.told |= json.loads(line)
        return bool(part)

    def look(self) -> bool:
        """Whether it has lost a process that it needs for longer than it may take to say so."""
        needs = {} if "ended" in self.told else self.told.get("needs", {})
        lost = next((name for name, process in needs.items() if not _lives(process)), "")
        if not lost or not self.lost:
            self.lost, self._lost_at = lost, time.monotonic()
        return bool(lost) and time.monotonic() - self._lost_at > GRACE_SECONDS


class _Watched(Told):
    """The child."""

    def __init__(self, child: int, reading: int) -> None:
        super().__init__(reading)
        self._child = child

    def wait(self, blocked: Collection[int], heeded: Collection[int]) -> int:
        """Wait for its end; returns its status. Signals that this process gets from another one are passed on; those of
        the terminal reach the child by themselves. A child that hangs without what it needs is ended."""
        while True:
            got = signal.sigtimedwait(blocked, LOOK_SECONDS)
            if got is not None and got.si_signo in heeded and got.si_code <= 0:  # by kill(2) and its like
                os.kill(self._child, last_words.PASSED_ON[signal.Signals(got.si_signo)])
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self.read()
                    os.close(self._reading)
                    return ended[1]
            self.read()
            if self.look():
                self.hung = True
                os.kill(self._child, signal.SIGKILL)


def _lives(process: int) -> bool:
    try:
        return _state(Path("/proc", str(process)))[0] not in "ZX"
    except OSError:
        return False


def _state(folder: Path) -> list[str]:
    """Of a process in /proc: its state and its parent."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[:2]


def speak_for(status: int | None, watched: Told, memory: bool) -> int:
    """One sentence on what died; the run's files are closed, and its processes ended. Returns the exit code.
    ``status``: as of waitpid(2), if known; ``memory``: whether the kernel has killed for memory since the start."""
    told = watched.told
    number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) and not watched.hung else 0
    if watched.lost and number == signal.SIGABRT:  # by which Ray ends a process whose cluster is gone
        number = 0
    elif number:
        watched.lost = ""  # it went with the process
    cause = _cause(status, number, watched, memory)
    left = _end_descendants()
    closed = _close(told, cause) if "run_dir" in told else ""
    also = f" Processes that it left were ended ({left})." if left else ""
    print(f"asyncrlhf: {cause}.{also}{closed}", file=sys.stderr, flush=True)
    return 128 + number if number else 1


def _cause(status: int | None, number: int, watched: Told, memory: bool) -> str:
    if watched.lost:
        short = ", since memory was short" if memory else ""
        return f"Ray lost {NEEDED[watched.lost]}{short}; its logs are in {watched.told['ray']}/logs"
    if number == signal.SIGKILL and memory:
        return "the kernel killed the run's process, since memory was short (SIGKILL)"
    if number:
        how = "was killed" if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) else "crashed"
        return f"the run's process {how} ({signal.Signals(number).name})"
    code = "" if status is None else f" with exit code {os.waitstatus_to_exitcode(status)}"
    if error := _last_error_of_ray(watched.told):
        return f"Ray ended the run's process{code}: {error}; its logs are in {watched.told['ray']}/logs"
    logs = f"; Ray's logs are in {watched.told['ray']}/logs" if "ray" in watched.told else ""
    return f"the run's process ended{code} in the midst of its work, without a word of its own{logs}"


def _last_error_of_ray(told: dict[str, Any]) -> str:
    """The first sentence of what the part of Ray in the run's process logged last, if it is an error: on a cluster of
    the user's own it ends the process when it cannot reach the control store for a minute."""
    with suppress(OSError, KeyError):
        for path in Path(told["ray"], "logs").glob(f"python-core-driver-*_{told['process']}.log"):
            with path.open("rb") as file:
                file.seek(-min(path.stat().st_size, TAIL), os.SEEK_END)
                lines = file.read().decode(errors="replace").splitlines()
            records = [found for line in lines if (found := RECORD.match(line))]
            if records and records[-1]["severity"] in "ECF":
                return records[-1]["text"].partition(". ")[0].rstrip(".")
    return ""


def _end_descendants() -> int:
    """End the processes that descend from the child, which this process has inherited as they lost their parents, until
    there are none; returns how many there were."""
    ended: set[int] = set()
    limit = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < limit:
        found = _children()
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                ended.add(process)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not found:
            break
        time.sleep(0.02)
    return len(ended)


def _children() -> list[int]:
    """This process's living children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                state, parent = _state(entry)
                found += [int(entry.name)] if int(parent) == os.getpid() and state not in "ZX" else []
    return found


def _close(told: dict[str, Any], cause: str) -> str:
    """Remove ``status.json`` and write the summary, which the run's process could not; returns a sentence."""
    from asyncrlhf.records.write.whole_files import write_atomically

    folder = Path(told["run_dir"])
    facts: dict[str, Any] = {"run_dir": str(folder), "exit_reason": f"failed: {cause}.", "steps": _steps(folder)}
    facts |= {"steps_planned": told.get("steps_planned"), "records_whole": False}
    try:
        (folder / "status.json").unlink(missing_ok=True)
        write_atomically(folder / "summary.json", json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        return f" {folder} could not be closed: {error}."
    found = sorted(folder.glob("checkpoints/step-*"))
    on = f"checkpoint.resume=auto goes on from {found[-1].name}" if found else "it has no checkpoint"
    return f" {folder} ends after step {facts['steps']}; {on}."


def _steps(folder: Path) -> int:
    """The last step of a run's metrics."""
    with suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines()[::-1]:
            with suppress(ValueError, KeyError):
                return int(json.loads(line)["step"])
    return 0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
