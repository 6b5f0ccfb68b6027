"""A session of tests has its own temporary folder, and fails if a process, a file there or shared memory is left."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from contextlib import suppress
from multiprocessing import util
from multiprocessing.process import current_process
from pathlib import Path

import psutil
import pytest

from asyncrlhf.scratch import Scratch, remove_abandoned

VARIABLE = "TESTS_FOLDER"  # every process of the session has it in its environment
WORKER = "PYTEST_XDIST_WORKER"
SECONDS = 20.0  # for what is just ending
LONGEST = 8  # Ray's sockets are below it, and their paths may have 107 characters
# The process that starts tests is not their only one, and these end with it, not before.
ENDS_WITH_US = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
LOCKED = ("asyncrlhf-forks-", "asyncrlhf-ray-", "asyncrlhf-function-", "asyncrlhf-wandb-", "r-")
# Made by programs that keep them for their next start: torch's compiler (its cache) and the command `wandb` (its log).
KEPT_BY_OTHERS = ("torchinductor_", "debug-cli.")
SHARED = Path("/dev/shm")
# The CUDA driver makes it for a process that uses a GPU, as the one that runs these tests does until after this check.
# Its names are the driver's alone; no part of the code could remove them earlier.
OF_THE_DRIVER = "cuda.shm."


class Session:
    """What was there when the session began. Folders of earlier sessions that were killed or failed go now."""

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        self.scratch = Scratch("arlhf-", place if len(place) <= LONGEST else "/tmp")
        self.shared = set(SHARED.iterdir()) if SHARED.is_dir() else set()
        os.environ[VARIABLE] = os.environ["TMPDIR"] = tempfile.tempdir = str(self.scratch.path)

    def left(self) -> list[str]:
        """Sentences about what is left, after some patience."""
        deadline = time.monotonic() + SECONDS
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        for prefix in LOCKED:  # of processes that tests have killed: the next start would remove them
            remove_abandoned(prefix, str(self.scratch.path))
        processes = [f"process {p.pid}: {' '.join(line)[:200]}" for p, line in _ours(str(self.scratch.path))]
        own = _of_this_process()
        files = [
            f"file {path}"
            for path in self.scratch.path.iterdir()
            if not path.name.startswith(("pytest-of-", *KEPT_BY_OTHERS)) and str(path) not in own
        ]
        return processes + files + [f"shared memory {path}" for path in _unused(self.shared)]


def _of_this_process() -> set[str | None]:
    """Folders that go when this process ends, which runs the tests itself without xdist."""
    held = [finalizer.peek() for finalizer in list(weakref.finalize._registry)]  # type: ignore[attr-defined]
    folders = {found[2][0] for found in held if found and found[1] == tempfile.TemporaryDirectory._cleanup}  # type: ignore[attr-defined]
    return folders | {current_process()._config.get("tempdir")}  # type: ignore[attr-defined]


def _ours(mark: str) -> list[tuple[psutil.Process, list[str]]]:
    """Processes that were started by the session, wherever they hang now, with their command lines."""
    found, this = [], psutil.Process()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process == this or process.status() == psutil.STATUS_ZOMBIE:
                continue
            variables = process.environ()
            # A user's function gets no variables of others, but a temporary folder below ours.
            if variables.get(VARIABLE) == mark or variables.get("TMPDIR", "").startswith(mark):
                line = process.cmdline()
                if not (process.ppid() == this.pid and any(name in " ".join(line) for name in ENDS_WITH_US)):
                    found.append((process, line))
    return found


def _unused(before: set[Path]) -> list[Path]:
    """Shared memory of this user that is new, and that no living process has open: others run here, too."""
    new = []
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        with suppress(OSError):
            known = path in before or path.name.startswith(OF_THE_DRIVER)
            if not known and path.stat().st_uid == os.getuid():
                new.append(path)
    if not new:
        return []
    used = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if "multiprocessing.resource_tracker" in " ".join(process.cmdline()) and process.ppid() != os.getpid():
                return []  # of another program of this user, whose memory has no other sign
            used |= {file.path for file in process.memory_maps()} | {file.path for file in process.open_files()}
    return [path for path in new if str(path) not in used and path.exists()]


def pytest_configure(config: pytest.Config) -> None:
    if WORKER not in os.environ and os.environ.get(VARIABLE) is None:
        config.stash[SESSION] = Session()


SESSION = pytest.StashKey[Session]()


@pytest.hookimpl(trylast=True)  # after the processes and fixtures of the session have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    begun = session.config.stash.get(SESSION, None)
    if begun is None:
        return
    left = begun.left()
    if left:
        where = ("tests/leftovers.py", 0, "what the tests left")
        report = pytest.TestReport(
            "tests/leftovers.py", where, {}, "failed", "Left by the tests:\n" + "\n".join(left), "teardown"
        )
        session.config.pluginmanager.getplugin("terminalreporter").stats.setdefault("error", []).append(report)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
            if finalizer._callback is util._remove_temp_dir:  # type: ignore[attr-defined]
                finalizer()  # at this process's end it would miss its folder
        begun.scratch.close()
