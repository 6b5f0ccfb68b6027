"""A user's function in its own process: hanging, crashing and dying cost a rollout and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.rewards import confinement, sandbox
from asyncrlhf.rewards.reward import Scorer, WeightedSource
from asyncrlhf.rewards.reward_config import RewardConfig, SandboxConfig
from asyncrlhf.rewards.sandbox import SandboxSource
from tests.ray_run import is_alive, wait_until
from tests.unit.rewards.worlds import rollout


def scorer(name: str, seconds: float = 5.0, **limits: Any) -> Scorer:
    target = f"tests.reward_functions:{name}"
    config = RewardConfig(kind="python", target=target, timeout_seconds=seconds)
    source = SandboxSource(target, "reward.target", seconds, SandboxConfig(**limits))
    return Scorer({"score": WeightedSource(source)}, config, 16)


@pytest.fixture(scope="module")
def obeys() -> Iterator[Scorer]:
    made = scorer("obeys", 0.5)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        ("hang", "took longer than reward.timeout_seconds=0.5"),
        ("exit", "ended its process (exit code 7)"),
        ("kill", "ended its process (SIGKILL)"),
        ("raise", "raised ValueError: told to"),
        ("system exit", "raised SystemExit: 1"),
        ("text", "returned '1.0', which is not a finite number"),
    ],
)
def test_a_bad_rollout_fails_alone_and_the_worker_goes_on(obeys: Scorer, completion: str, cause: str) -> None:
    results = obeys.score([rollout(1, "x"), rollout(2, completion), rollout(3, "yyy")])
    assert [r.reward for r in results] == [1.0, None, 3.0]
    assert results[1].error and cause in results[1].error and "\n" not in results[1].error
    assert [r.reward for r in obeys.score([rollout(4, "four")])] == [4.0]


def test_what_it_prints_stays_off_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    made = scorer("obeys")
    assert made.score([rollout(1, "print")])[0].reward == 5.0
    made.close()
    out, err = capfd.readouterr()
    assert out == "" and "to the standard output" in err


def test_calls_share_a_process_that_is_not_this_one_and_ends_with_the_source() -> None:
    ids = scorer("process_ids")
    first, second = (ids.score([rollout(i, "x")])[0].reward for i in (1, 2))
    assert first == second and first is not None
    child = psutil.Process(int(first))
    assert child.pid != psutil.Process().pid
    child.kill()
    wait_until(lambda: not is_alive(child), "the child's death")
    third = ids.score([rollout(3, "x")])[0].reward
    assert third not in (None, first), "one that was killed from outside is started again"
    ids.close()
    assert third is not None
    wait_until(lambda: not psutil.pid_exists(int(third)), "the end of the child")


@pytest.mark.more
def test_the_processes_that_a_function_left_end_with_it(tmp_path: Path) -> None:
    made = scorer("leaves_a_process", 2.0)
    note = tmp_path / "process"
    (result,) = made.score([rollout(1, "x", metadata={"file": str(note)})])
    assert result.error and "took longer" in result.error
    left = int(note.read_text())
    wait_until(lambda: not psutil.pid_exists(left) or not is_alive(psutil.Process(left)), "the end of the grandchild")


@pytest.mark.parametrize("function", ["leaves_a_process", "keeps_the_lock"])
def test_a_child_ends_when_its_parent_is_gone(tmp_path: Path, function: str) -> None:
    """The parent is killed while the function hangs: nobody is left to end the child and what it started; nor does a
    thread of the child run where the function keeps Python's lock. Its folder goes with it."""
    note, place = tmp_path / "process", tmp_path / "temporary"
    place.mkdir()
    program = f"""
import numpy as np
from asyncrlhf.rewards.sandbox import SandboxSource
from asyncrlhf.types import Prompt, Rollout
one = np.zeros(1, np.int64)
prompt = Prompt("p", "p", one, metadata={{"file": {str(note)!r}}})
source = SandboxSource("tests.reward_functions:{function}", "reward.target", 60.0)
print(source._child._process.pid, flush=True)
source.scores([Rollout(1, 1, prompt, one, one, one, "stop", "x", "g")])
"""
    command, env = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(place)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: note.is_file() and note.read_text(), "the function's beginning")
    assert len(list(place.iterdir())) == 1
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(child), "the end of the orphan", 5.0)
    wait_until(lambda: not psutil.pid_exists(int(note.read_text())), "the end of what the function started", 5.0)
    wait_until(lambda: not any(place.iterdir()), "the end of its folder", 5.0)


def test_what_a_function_started_ends_where_its_process_alone_is_killed(tmp_path: Path) -> None:
    """As Ray does with the children of an actor that it ends."""
    note, made = tmp_path / "process", scorer("leaves_a_process", 60.0)
    asked = rollout(1, "x", metadata={"file": str(note)})
    waiting = threading.Thread(target=made.score, args=([asked],))
    (source,) = (part.source for part in made.sources.values())
    waiting.start()
    wait_until(lambda: note.is_file() and note.read_text(), "the function's beginning")
    started = psutil.Process(int(note.read_text()))
    source._child._process.kill()
    wait_until(lambda: not is_alive(started), "the end of what the function started", 5.0)
    waiting.join()
    made.close()


def test_a_target_that_cannot_be_loaded_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.target=tests\.reward_functions:nobody: .* has no 'nobody'\.$"):
        SandboxSource("tests.reward_functions:nobody", "reward.target", 1.0)


def test_an_import_that_never_ends_or_ends_the_process_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sandbox_test_ends.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "sandbox_test_hangs.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"sandbox_test_ends:f: the import ended the process \(exit code 5\)"):
        SandboxSource("sandbox_test_ends:f", "reward.target", 1.0)
    monkeypatch.setattr(sandbox, "START_SECONDS", 1.0)
    with pytest.raises(ConfigError, match=r"sandbox_test_hangs:f: the import took longer than 1 s"):
        SandboxSource("sandbox_test_hangs:f", "reward.target", 1.0)


@pytest.fixture(scope="module")
def greedy() -> Iterator[Scorer]:
    made = scorer("greedy", 20.0, memory_gb=2, processes=8)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        ("forks", "started more than reward.sandbox.processes=8."),
        ("memory", "raised MemoryError"),
        ("file", "raised OSError: [Errno 27] File too large"),
        ("files", "raised OSError: [Errno 24] Too many open files"),
        ("answers", "answered something else than scores"),
    ],
)
@pytest.mark.more_but(every=3)
def test_what_takes_too_much_fails_alone_and_leaves_nothing(
    greedy: Scorer, completion: str, cause: str, tmp_path: Path
) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    results = greedy.score([rollout(1, completion, metadata={"file": str(tmp_path / "made")})])
    assert results[0].error and cause in results[0].error and "\n" not in results[0].error
    assert not (tmp_path / "made").exists(), "what the function sends runs nothing here"
    assert [r.reward for r in greedy.score([rollout(4, "four")])] == [4.0]
    wait_until(lambda: len({p.pid for p in psutil.Process().children(recursive=True)} - before) <= 2, "the forks' end")


@pytest.mark.more
def test_a_process_that_left_the_group_ends_all_the_same(tmp_path: Path) -> None:
    note = tmp_path / "process"
    made = scorer("greedy", 2.0)
    assert "took longer" in str(made.score([rollout(1, "escapes", metadata={"file": str(note)})])[0].error)
    left = int(note.read_text())
    wait_until(lambda: not psutil.pid_exists(left) or not is_alive(psutil.Process(left)), "the end of the escaped")
    made.close()


def test_without_network_nobody_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = rollout(1, "network", metadata={"port": server.getsockname()[1]})
        made = scorer("greedy")
        assert made.score([asked])[0].reward == 7.0
        made.close()
        try:
            made = scorer("greedy", network=False)
        except ConfigError as error:
            pytest.skip(str(error))
        assert "OSError" in str(made.score([asked])[0].error)
        made.close()


def test_where_a_kernel_gives_no_namespace_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def unshare(self, _: int) -> int:
            confinement.ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(confinement.ctypes, "CDLL", Refusing)
    with pytest.raises(
        ConfigError, match=r"is not possible .*no network namespace \(Operation not permitted\); allowed"
    ):
        confinement.confine(SandboxConfig(network=False))


def test_it_runs_in_a_folder_of_its_own_without_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-key")
    monkeypatch.setenv("DATABASE", "postgres://user:planted-pw@host/db")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    names = ("SOME_API_KEY", "DATABASE", "TOKENIZERS_PARALLELISM", "PATH")
    asked = [rollout(i, name) for i, name in enumerate(names)]
    stripped, given = scorer("where_and_what"), scorer("where_and_what", env=["SOME_API_KEY"])
    assert [r.reward for r in stripped.score(asked)] == [10.0, 10.0, 11.0, 11.0]
    assert [r.reward for r in given.score(asked)] == [11.0, 10.0, 11.0, 11.0]
    stripped.close()
    given.close()
