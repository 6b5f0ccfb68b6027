"""The server that forks Ray's workers, called as Ray's node calls it; a script of that name stands for Ray's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.workers import setup_worker

from asyncrlhf.cli import one_run
from asyncrlhf.cluster import forked_workers
from asyncrlhf.cluster.forked_workers import WORKER, ForkedWorkers
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from tests.ray_run import wait_until

ANSWER = """
import json, os, sys
facts = {"words": sys.argv[1:], "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0)}
facts |= {"cwd": os.getcwd(), "GIVEN": os.environ.get("GIVEN"), "name": __name__}
facts["imported"] = "torch" in sys.modules and "ray" in sys.modules
if "pyarrow" in sys.modules:
    before = {name.partition(".")[0] for name in sys.modules}
    sys.modules["pyarrow"].array([1])
    facts["late"] = sorted({name.partition(".")[0] for name in sys.modules} - before)
facts["seconds"] = os.times().user + os.times().system
print(json.dumps(facts), flush=True)
"""


@pytest.fixture(scope="module")
def workers() -> Iterator[ForkedWorkers]:
    workers = ForkedWorkers()
    yield workers
    workers.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / WORKER).write_text(ANSWER)
    (tmp_path / "other.py").write_text(ANSWER)
    return tmp_path


def call(workers: ForkedWorkers, folder: Path, script: str = WORKER, **context: Any) -> dict[str, Any]:
    """What the script says of its process, and the process group that Ray's node would end with it."""
    words_before, words_after = ["-u"], []
    if context:
        words_before = [setup_worker.__file__]
        words_after = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
    environment = {"PATH": os.environ["PATH"], "GIVEN": "by the caller"}
    with workers.serving():
        line = [sys.executable, *words_before, str(folder / script), "--worker-id=7", *words_after]
    process = subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, process_group=0)
    out, _ = process.communicate(timeout=100)
    return {**json.loads(out), "started": process.pid}


@pytest.mark.thorough
def test_a_worker_whose_command_ray_has_ended_ends_without_a_word(
    workers: ForkedWorkers, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(workers, folder)  # the imports are done
    server = psutil.Process(workers.server.pid)
    server.suspend()
    with workers.serving():
        line = [sys.executable, str(folder / WORKER)]
    waiting = subprocess.Popen(line, process_group=0)
    # It has called once it waits for the answer: the kernel takes the call while the server stands still.
    wait_until(lambda: "poll" in Path(f"/proc/{waiting.pid}/wchan").read_text(), "the command's call")
    waiting.kill()
    waiting.wait(30)
    server.resume()
    call(workers, folder)
    wait_until(lambda: not server.children(), "the end of the fork whose command has ended")
    assert capfd.readouterr() == ("", "")


@pytest.mark.more
@pytest.mark.in_turn
def test_a_worker_is_a_fork_that_has_the_imports_and_all_that_ray_gave_it(workers: ForkedWorkers, folder: Path) -> None:
    first, second = call(workers, folder), call(workers, folder)
    for facts in (first, second):
        assert facts["imported"] and facts["name"] == "__main__" and facts["words"] == ["--worker-id=7"]
        assert facts["parent"] == workers.server.pid and facts["pid"] != facts["started"]
        assert facts["group"] == facts["started"], "Ray would not end this worker's children with it"
        assert facts["GIVEN"] == "by the caller" and facts["cwd"] == str(folder)
        assert facts["seconds"] < 1, "a fork took as long as the imports"
        assert facts["late"] == [], "packages that the first record imports"
    assert first["pid"] != second["pid"]
    # Counted as Python 3.12 does, which warns of a fork of more: those that no handler has ended before it.
    assert psutil.Process(workers.server.pid).num_threads() == 1, "another thread may hold a lock at a fork"


def test_the_variables_of_a_runtime_environment_are_set(workers: ForkedWorkers, folder: Path) -> None:
    facts = call(workers, folder, env_vars={"GIVEN": "by the runtime environment"})
    assert facts["parent"] == workers.server.pid and facts["GIVEN"] == "by the runtime environment"
    assert facts["words"] == ["--worker-id=7"]


@pytest.mark.parametrize("context", [{"env_vars": {"PYTHONPATH": "/elsewhere"}}, {"command_prefix": [":", "&&"]}])
def test_what_counts_when_a_process_starts_needs_a_process(
    workers: ForkedWorkers, folder: Path, context: dict[str, Any]
) -> None:
    facts = call(workers, folder, **context)
    assert facts["pid"] == facts["started"] and not facts["imported"] and facts["words"] == ["--worker-id=7"]


def test_anything_but_a_worker_is_run_by_the_interpreter(workers: ForkedWorkers, folder: Path) -> None:
    facts = call(workers, folder, "other.py")
    assert facts["pid"] == facts["started"] and not facts["imported"] and facts["words"] == ["--worker-id=7"]


def test_a_worker_without_a_server_is_run_by_the_interpreter(folder: Path) -> None:
    workers = ForkedWorkers()
    workers.server.kill()
    facts = call(workers, folder)
    workers.close()
    assert facts["pid"] == facts["started"] and facts["GIVEN"] == "by the caller"


@pytest.mark.in_turn
@pytest.mark.more
def test_workers_of_a_server_whose_imports_open_a_device_are_not_forked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # /dev/full stands for a GPU.
    (tmp_path / "sitecustomize.py").write_text("import os; os.open('/dev/full', os.O_RDONLY)")
    monkeypatch.syspath_prepend(tmp_path)
    workers = ForkedWorkers()
    first, second = call(workers, folder), call(workers, folder)
    workers.close()
    assert all(facts["pid"] == facts["started"] for facts in (first, second)), "a fork in which CUDA would fail"
    said = "Ray's workers are not forked, and start later: a library that they import has opened /dev/full."
    assert [line for line in capfd.readouterr().err.splitlines() if "forked" in line] == [said]


@pytest.mark.in_turn
@pytest.mark.more
def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "from asyncrlhf.cluster.forked_workers import ForkedWorkers; import os, signal; w = ForkedWorkers();"
        "print(w.server.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    server = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(server), "the end of a server whose starter was killed")


def begin(monkeypatch: pytest.MonkeyPatch) -> psutil.Process:
    """A server that is begun on a machine with many cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    forked_workers.begin()
    made = forked_workers._Begun.workers
    assert made is not None
    return psutil.Process(made.server.pid)


def test_a_server_that_was_begun_serves_the_next_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = begin(monkeypatch)
    monkeypatch.setenv("RAY_SOMETHING", "1")  # Ray's settings come with the first call
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # torch sets it where it looks at a GPU
    monkeypatch.syspath_prepend(tmp_path)
    taken = forked_workers.take()
    try:
        assert taken.server.pid == begun.pid and begun.is_running()
        assert forked_workers._Begun.workers is None
        assert psutil.Process(taken.server.pid).environ()["MALLOC_ARENA_MAX"] == "1"
    finally:
        taken.close()


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "HF_HOME"])
def test_a_server_begun_with_another_environment_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is read when a process starts, or one that had another value."""
    monkeypatch.setenv("HF_HOME", "/before")
    begun = begin(monkeypatch)
    monkeypatch.setenv(name, "1000")
    taken = forked_workers.take()
    try:
        assert taken.server.pid != begun.pid
        assert psutil.Process(taken.server.pid).environ()[name] == "1000"
        assert not begun.is_running()
    finally:
        taken.close()


def test_a_run_that_is_refused_leaves_no_server_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def refuse(config: RunConfig) -> None:
        assert forked_workers._Begun.workers is not None
        started.append(forked_workers._Begun.workers.server.pid)
        raise ConfigError("no")

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("asyncrlhf.orchestrator.run.train", refuse)
    with pytest.raises(ConfigError, match="no"):
        one_run.run(RunConfig(runtime="ray"))
    assert started and not psutil.pid_exists(started[0])


def test_one_core_begins_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    forked_workers.begin()
    assert forked_workers._Begun.workers is None
