"""What becomes of a run whose machine changes under it: its disk, clock, memory and limits; and of one that is stopped.

The disks are real: a small one in memory, in a name space of its own, where an ordinary user may mount it, too.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.exceptions import RayActorError

from asyncrlhf.cli.main import main
from asyncrlhf.cli.status import status_lines
from asyncrlhf.cluster import ray_calls
from asyncrlhf.errors import ShortageError, StallError, shortage
from asyncrlhf.orchestrator.learning import bookkeeping
from asyncrlhf.records.read.verify import verify
from asyncrlhf.records.write.recorder import RunRecorder, read_metrics
from asyncrlhf.records.write.whole_files import write_atomically
from tests.integration.test_parent import started
from tests.loop import FAKE, QUIET, run, small_checkpoint

ROOT = Path(__file__).resolve().parents[2]
Patch = pytest.MonkeyPatch
Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def model(capsys: Said) -> None:
    """It is made by the first test of a session that needs it, and transformers says so."""
    small_checkpoint()
    capsys.readouterr()


class Disk:
    """8 MiB of memory as a disk, which a process of its own holds mounted; ``path`` leads there from this one."""

    SCRIPT = "mkdir -p {0} && mount -t tmpfs -o size=8m none {0} && echo mounted && cat"

    def __init__(self, folder: Path) -> None:
        if not (shutil.which("unshare") and shutil.which("nsenter")):
            pytest.skip("no unshare or nsenter, to mount a disk as an ordinary user")
        place = folder / "disk"
        line = ["unshare", "-rm", "sh", "-c", self.SCRIPT.format(place)]
        self._holder = subprocess.Popen(line, text=True, stdin=-1, stdout=-1, stderr=-1)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            pytest.skip(f"this machine lets no user mount a disk: {self._holder.communicate()[1].strip()}")
        self._place = str(place)
        self.path = Path(f"/proc/{self._holder.pid}/root{place}")

    def _inside(self, command: str) -> None:
        line = ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials", "sh", "-c", command]
        subprocess.run([*line, "sh", self._place], check=True)

    def fill(self) -> None:
        with (self.path / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        (self.path / "filler").unlink()

    def protect(self) -> None:
        """As the kernel does at an error of a disk: what is opened from now on can only be read."""
        self._inside('mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"')

    def unprotect(self) -> None:
        self._inside('umount "$1"')

    def close(self) -> None:
        self._holder.communicate("", timeout=20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    held = Disk(tmp_path)
    yield held
    held.close()


def in_the_midst(patch: Patch, strike: Callable[[], None], step: int = 4) -> None:
    """Call ``strike`` once, just before the records of a step."""
    log_step = RunRecorder.log_step

    def struck(self: RunRecorder, row: dict[str, Any]) -> None:
        if row["step"] == step:
            strike()
        log_step(self, row)

    patch.setattr(RunRecorder, "log_step", struck)


def words(run_dir: Path, *further: str) -> list[str]:
    own = [*FAKE, *QUIET, f"model.path={small_checkpoint()}", "runtime=local", "checkpoint.every=2"]
    return ["train", *own, "logging.flush_every=16", f"run_dir={run_dir}", *further]


def goes_on(run_dir: Path, steps: int) -> None:
    """Nothing was lost: the next attempt ends with totals that add up."""
    assert verify(run_dir) == []
    assert main(words(run_dir, f"steps={steps}", "checkpoint.resume=auto")) == 0
    assert verify(run_dir) == []
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["ledger"]["trained"] == steps * 16


@pytest.mark.parametrize(
    ("strike", "repair", "what"),
    [("fill", "empty", "The disk is full"), ("protect", "unprotect", "The disk is read-only")],
)
def test_a_disk_that_fills_or_turns_read_only(
    strike: str, repair: str, what: str, disk: Disk, monkeypatch: Patch, capsys: Said
) -> None:
    run_dir = disk.path / "run"
    with monkeypatch.context() as patch:
        in_the_midst(patch, getattr(disk, strike))
        assert main(words(run_dir, "steps=8")) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"asyncrlhf: {what}: {run_dir}"), said
    assert "checkpoint.resume=auto goes on" in said and "status.json" not in said, "it is no cause"
    with pytest.raises(OSError) as refused:
        write_atomically(run_dir / "further.json", " " * 4096)
    assert refused.value.filename == str(run_dir / "further.json")
    halves = [path for path in run_dir.rglob("*.tmp") if path.is_file()]
    # What was half written when the disk turned read-only cannot be removed there.
    assert halves == [] or strike == "protect"
    assert not ((run_dir / "error.txt").exists() and not (run_dir / "error.txt").read_text())
    getattr(disk, repair)()
    goes_on(run_dir, 8)
    assert not [path for path in run_dir.rglob("*.tmp") if path.is_file()]


def test_what_a_later_attempt_needs_outlives_the_machine(tmp_path: Path, monkeypatch: Patch) -> None:
    """A disk that turns read-only, or a machine without power, loses what was written without fsync."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    run(tmp_path, *FAKE, "steps=2", "checkpoint.every=1")
    names = {Path(path).name.removesuffix(".tmp") for path in synced}
    assert {"config.yaml", "attempts.json", "summary.json", "metrics.jsonl", "journal.jsonl"} <= names
    assert "status.json" not in names, "each second one would wait for the disk"


@pytest.mark.parametrize("seconds", [60.0, 1e6])
def test_a_disk_that_hangs_is_waited_for_and_then_named(
    seconds: float, tmp_path: Path, monkeypatch: Patch, capsys: Said
) -> None:
    """The thread that records a step is not back for so long, by the run's clock."""
    off_loop, calls = bookkeeping.off_loop, []

    async def hanging(action: Callable[[], Any]) -> Any:
        calls.append(action)
        if len(calls) == 8:
            await asyncio.sleep(seconds)
        return await off_loop(action)

    monkeypatch.setattr(bookkeeping, "off_loop", hanging)
    options = [*FAKE, "steps=8", "stall_timeout_seconds=40", "logging.progress=plain"]
    if seconds < 2 * 40:
        assert run(tmp_path, *options).summary["exit_reason"] == "done"
    else:
        blamed = r"No progress for 8\d s: the record of step \d, begun 8\d s ago, is under way; its disk may hang\."
        with pytest.raises(StallError, match=blamed):
            run(tmp_path, *options)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"No progress for 4\d s\. The learner .* the record of step \d, begun 4\d s ago", said), said


def test_a_process_that_may_open_no_more_files(tmp_path: Path, monkeypatch: Patch, capsys: Said) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use_up() -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))

    try:
        with monkeypatch.context() as patch:
            in_the_midst(patch, use_up)
            code = main(words(tmp_path, "steps=8"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = capsys.readouterr().err
    assert code == 1 and said.startswith(f"asyncrlhf: Too many files are open: {tmp_path}"), said
    assert "with a higher `ulimit -n`, checkpoint.resume=auto goes on" in said
    goes_on(tmp_path, 8)


def test_a_run_whose_memory_is_short(tmp_path: Path, monkeypatch: Patch, capsys: Said) -> None:
    with monkeypatch.context() as patch:
        in_the_midst(patch, lambda: bytearray(1 << 60) and None)
        assert main(words(tmp_path, "steps=8")) == 1
    said = capsys.readouterr().err
    assert said.startswith("asyncrlhf: Memory is short (MemoryError). What was written is kept; with a smaller "), said
    assert "bytearray" in (tmp_path / "error.txt").read_text()
    assert shortage(MemoryError()) == "", "no run's error: no checkpoint goes on"
    goes_on(tmp_path, 8)


# Where the time of day is right: it is shown, or goes to a program that asks for it.
TIMES_OF_DAY = {
    "records/write/status.py", "cli/status.py", "records/show/mlflow_sink.py", "episodes/agents/answers.py",
    "cluster/ray_placement.py", "cli/watch.py",
}  # fmt: skip


def test_no_duration_is_measured_by_the_time_of_day() -> None:
    """It may jump: a laptop wakes up, a server of time corrects it, a user sets it."""
    found = set()
    for path in (ROOT / "asyncrlhf").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "time.time" in text else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time":
                found.add(str(path.relative_to(ROOT / "asyncrlhf")))
    assert found == TIMES_OF_DAY


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_changes_no_step_and_no_sentence(jump: float, tmp_path: Path, monkeypatch: Patch) -> None:
    now = time.time
    with monkeypatch.context() as patch:
        in_the_midst(patch, lambda: patch.setattr(time, "time", lambda: now() + jump))
        done = run(tmp_path / "jumped", *FAKE, "steps=8")
    plain = run(tmp_path / "plain", *FAKE, "steps=8")
    assert done.untimed_metrics == plain.untimed_metrics
    (tmp_path / "jumped" / "summary.json").unlink()
    later = {"host": socket.gethostname(), "pid": 1, "written": now() - jump}
    shown = {name: value for name, value in STATUS.items() if name not in later}
    (tmp_path / "jumped" / "status.json").write_text(json.dumps(shown | later))
    since = {3600.0: "1 h 00 min", -3600.0: "0.0 s"}[jump]
    assert f"it was killed {since} ago" in next(status_lines(tmp_path / "jumped", now()))


STATUS: dict[str, Any] = {
    "doing": "trains", "step": 1, "steps": 2, "published_version": 1, "buffer": 0, "in_flight": 0,
    "waiting_to_be_issued_again": 0, "seconds_without_movement": 0.0, "restarts": {}, "waits": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "kills", "said", "sentence"),
    [
        ("learner-0", 1, "", " Memory was short; it needs less with a smaller learner.token_budget"),
        ("generator-3", 1, "", " Memory was short; it needs less with fewer generator.slots."),
        ("reward-0", 0, "\nThe node was running low on memory.", " Memory was short; it needs less with fewer reward."),
        ("reward-0", 0, "", ""),
    ],
)
def test_a_part_that_was_ended_for_memory(part: str, kills: int, said: str, sentence: str, monkeypatch: Patch) -> None:
    """By the kernel, which counts that, or by Ray before it."""
    monkeypatch.setattr(ray_calls, "memory_kills", lambda: ray_calls._Kills.known + kills)
    monkeypatch.setattr(ray_calls._Kills, "known", 7)
    told = str(ray_calls.translated(part, RayActorError(error_msg=f"The actor died unexpectedly.{said}")))
    assert told.startswith(f"{part} died: The actor died unexpectedly.{sentence}")
    monkeypatch.setattr(ray_calls, "memory_kills", lambda: 7 + kills)
    assert "Memory" not in str(ray_calls.translated(part, RayActorError(error_msg="It died."))), "that was another's"


CALLS: list[object] = []


def large(tokens: Any) -> Any:
    """A loss for which memory is short after a few steps."""
    CALLS.append(None)
    torch.empty(2**50 if len(CALLS) > 8 else 1)
    return -tokens.advantages * tokens.policy_logprobs


@pytest.mark.in_turn
@pytest.mark.more
def test_a_learner_whose_memory_is_short(ray_local: Any, tmp_path: Path) -> None:
    smaller = r"with a smaller learner\.token_budget, or a learner\.sharding .* checkpoint\.resume=auto goes on"
    with pytest.raises(ShortageError, match=rf"^Memory is short in learner-0 \(.*can't allocate memory.* {smaller}"):
        run(tmp_path, *FAKE, "runtime=ray", f"algorithm.loss.target={__name__}:large", "checkpoint.every=1")
    assert verify(tmp_path) == [] and len(read_metrics(tmp_path / "metrics.jsonl")) > 1
    assert run(tmp_path, *FAKE, "runtime=ray", "steps=8", "checkpoint.resume=auto").summary["exit_reason"] == "done"


class Clock:
    """The time of day of processes that start within, shifted by as many seconds as ``shift`` says."""

    SOURCE = """
        #define _GNU_SOURCE
        #include <fcntl.h>
        #include <stdlib.h>
        #include <sys/mman.h>
        #include <sys/syscall.h>
        #include <sys/time.h>
        #include <time.h>
        #include <unistd.h>
        static volatile long none, *shift = &none;
        __attribute__((constructor)) static void begin(void) {
            int file = open(getenv("CLOCK_SHIFT"), O_RDONLY);
            void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
            if (found != MAP_FAILED) shift = found;
            if (file >= 0) close(file);
        }
        int clock_gettime(clockid_t kind, struct timespec *at) {
            int failed = syscall(SYS_clock_gettime, kind, at);
            if (!failed && (kind == CLOCK_REALTIME || kind == CLOCK_REALTIME_COARSE)) at->tv_sec += *shift;
            return failed;
        }
        int gettimeofday(struct timeval *at, void *zone) {
            struct timespec now;
            clock_gettime(CLOCK_REALTIME, &now);
            at->tv_sec = now.tv_sec;
            at->tv_usec = now.tv_nsec / 1000;
            return 0;
        }
        time_t time(time_t *at) {
            struct timespec now;
            clock_gettime(CLOCK_REALTIME, &now);
            if (at) *at = now.tv_sec;
            return now.tv_sec;
        }"""

    def __init__(self, folder: Path, patch: Patch) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler, for a clock that jumps")
        self._file = folder / "shift"
        self.shift(0)
        line = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(folder / "clock.so")]
        subprocess.run(line, input=self.SOURCE, text=True, check=True)
        patch.setenv("CLOCK_SHIFT", str(self._file))
        patch.setenv("LD_PRELOAD", str(folder / "clock.so"))

    def shift(self, seconds: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


@pytest.mark.thorough
def test_a_clock_that_jumps_and_a_stop_of_all_processes_end_no_run(tmp_path: Path, monkeypatch: Patch) -> None:
    """As a laptop that sleeps, and a cluster that stops a job for another: longer than twice the limit."""
    limit = 10.0
    with monkeypatch.context() as patch:
        clock = Clock(tmp_path, patch)
        words = (*FAKE, *QUIET, "steps=100000", "checkpoint.every=5", f"stall_timeout_seconds={limit:g}")
        with started(tmp_path, *words) as command:
            own = command.until(6)
            assert "clock.so" in Path(f"/proc/{own.pid}/maps").read_text()
            for seconds in (3600, -3600):
                clock.shift(seconds)
                command.until(command.steps() + 8)
            everything = [psutil.Process(command.process.pid), own, *own.children(recursive=True)]
            for process in everything:
                process.suspend()
            time.sleep(2.2 * limit)  # of which no process knows
            for process in everything:
                process.resume()
            command.until(command.steps() + 8)
            command.process.send_signal(signal.SIGTERM)
            code, said = command.end()
            assert code == 128 + signal.SIGTERM and command.reason == "interrupted", said
    # Not that no part was replaced: on a crowded machine the learner once was, and went on from its newest checkpoint.
    assert verify(command.run_dir) == []
    times = [row["wall_time"] for row in read_metrics(command.run_dir / "metrics.jsonl")]
    assert times == sorted(times) and times[-1] < 1800, "no step took the hour"
