"""The process above a command: what it says when the run's own process dies, what it cleans up, and restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import asyncrlhf
from asyncrlhf.cli import parent
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.read.verify import verify
from asyncrlhf.report.html import build_report
from tests.loop import FAKE, QUIET
from tests.processes import lives, ray_files

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 140.0  # for each thing that is waited for
LOCAL = (*FAKE, *QUIET, "runtime=local", "checkpoint.every=5", "logging.report=false")


class Command:
    """A command as a user starts it, with its own process below the one that was started."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run_dir = folder / "run"
        command = [sys.executable, "-m", "asyncrlhf", "train", f"run_dir={self.run_dir}", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def until(self, step: int) -> psutil.Process:
        """Wait for a step; returns the run's own process."""
        wait_for(lambda: self.steps() >= step, f"step {step}", lambda: self.process.poll() is None)
        # The others are what those below left.
        return min(psutil.Process(self.process.pid).children(), key=lambda child: child.create_time())

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        return int(json.loads(rows[-1])["step"]) if rows else 0

    def says(self, words: str) -> list[str]:
        """Wait for a sentence; returns what was said up to it."""
        assert self.process.stderr is not None
        deaf = threading.Timer(SECONDS, self.process.kill)
        deaf.start()
        said = [self.process.stderr.readline()]
        while words not in said[-1] and said[-1]:
            said.append(self.process.stderr.readline())
        assert said[-1], f"it did not say {words!r}, but {said}"
        deaf.cancel()
        return said

    def end(self) -> tuple[int, list[str]]:
        """The exit code, and the sentences."""
        _, said = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, [line for line in said.splitlines() if line.startswith("asyncrlhf: ")]

    @property
    def reason(self) -> str:
        return str(json.loads((self.run_dir / "summary.json").read_text())["exit_reason"])


def wait_for(
    there: Callable[[], bool], what: str, alive: Callable[[], bool] = lambda: True, seconds: float = SECONDS
) -> None:
    limit = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < limit and alive(), f"there was no {what}"
        time.sleep(0.02)


@contextmanager
def started(folder: Path, *words: str):  # type: ignore[no-untyped-def]
    command = Command(folder, *words)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait(SECONDS)


@pytest.mark.parametrize(
    ("number", "word"),
    [
        pytest.param(signal.SIGSEGV, "crashed (SIGSEGV)", marks=pytest.mark.thorough),
        (signal.SIGKILL, "was killed (SIGKILL)"),
    ],
)
def test_a_process_that_dies_is_spoken_for(number: signal.Signals, word: str, tmp_path: Path) -> None:
    """What it left is ended, too, even a process of a session of its own, whose parent is gone."""
    leaves = number == signal.SIGKILL
    (tmp_path / "leaves.py").write_text(LEAVES)
    more = ("algorithm.loss.target=leaves:loss",) if leaves else ()
    with started(tmp_path, *LOCAL, "steps=100000", *more) as command:
        own = command.until(12)
        if leaves:
            wait_for((tmp_path / "left").exists, "process that was left")
            left = int((tmp_path / "left").read_text())
            assert lives(left)
        os.kill(own.pid, number)
        code, said = command.end()
        assert code == 128 + number and len(said) == 1, said
        assert (
            said[0].startswith(f"asyncrlhf: the run's process {word}.") and "checkpoint.resume=auto goes on" in said[0]
        )
        assert "Processes that it left were ended (" in said[0] or not leaves
        assert command.reason == f"failed: the run's process {word}."
        assert not (command.run_dir / "status.json").exists() and verify(command.run_dir) == []
        if leaves:
            wait_for(lambda: not lives(left), "end of the process that was left")


LEAVES = """
import subprocess, sys
from pathlib import Path

CHILD = "import os, time; open('left.new', 'w').write(str(os.getpid())); os.rename('left.new', 'left'); time.sleep(600)"
ABOVE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)"

def loss(tokens):
    if not Path("left").exists():
        subprocess.run([sys.executable, "-c", ABOVE])
    return -tokens.advantages * tokens.policy_logprobs
"""


@pytest.mark.more
@pytest.mark.in_turn
def test_a_run_goes_on_by_itself(tmp_path: Path) -> None:
    with started(tmp_path, *LOCAL, "steps=30", "restarts=1") as command:
        for step in (2, 12):  # a budget of one that each attempt's steps refill; there is a checkpoint from 5 on
            os.kill(command.until(step).pid, signal.SIGKILL)
            wait_for(lambda: not (command.run_dir / "status.json").exists(), "sentence of the parent")
        held = psutil.Process(command.process.pid).memory_full_info().uss
        assert held < 30 * 2**20, "the parent stays small when it has spoken, too"
        code, said = command.end()
        assert code == 0 and command.reason == "done", said
        starts = [sentence.partition(" in 1 s, ")[2] for sentence in said if "the next attempt begins" in sentence]
        assert starts == ["from its start.", "from its newest checkpoint."]
        assert command.steps() == 30
        assert verify(command.run_dir) == []
        page = build_report([command.run_dir]).read_text()
        assert "<h3>Attempts</h3>" in page and page.count("failed: the run&#39;s process was killed (SIGKILL).") == 2


@pytest.mark.thorough
def test_an_attempt_that_dies_before_it_has_read_its_settings_is_one_too(tmp_path: Path) -> None:
    """Its first import kills it, once."""
    (tmp_path / "hydra.py").write_text(KILLS)
    with started(tmp_path, *LOCAL, "steps=4", "restarts=1") as command:
        code, said = command.end()
        assert code == 0 and command.reason == "done" and command.steps() == 4, said
        assert [sentence.split(" (")[0] for sentence in said] == [
            "asyncrlhf: the run's process was killed", "asyncrlhf: the next attempt begins in 2 s, from its start.",
        ]  # fmt: skip


KILLS = """
import os, pathlib, signal, sys
pathlib.Path(__file__).unlink()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_attempts_without_a_step_end(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    with started(tmp_path, *LOCAL, "steps=40", "restarts=9", "algorithm.loss.target=fails:loss") as command:
        code, said = command.end()
        assert code == 1 and said[-1] == "asyncrlhf: no further attempt, since 2 attempts made no step.", said
        assert len(json.loads((command.run_dir / "attempts.json").read_text())) == 2


FAILS = """
def loss(tokens):
    if len(tokens.rewards) > 2:  # no trial before the run
        raise RuntimeError("never")
    return -tokens.advantages * tokens.policy_logprobs
"""


@pytest.mark.in_turn
@pytest.mark.more
def test_a_signal_to_the_whole_group_ends_in_order(tmp_path: Path) -> None:
    """As a scheduler sends it: the run must not take what the parent passes on for a second signal. To one process
    alone: test_notices.py."""
    with started(tmp_path, *LOCAL, "steps=100000", "restarts=3") as command:
        command.until(6)
        os.killpg(command.process.pid, signal.SIGTERM)
        code, said = command.end()
        assert code == 128 + signal.SIGTERM and command.reason == "interrupted", said
        newest = max(int(path.name.rpartition("-")[2]) for path in command.run_dir.glob("checkpoints/step-*"))
        assert newest == command.steps(), "the run ended in order, with a checkpoint"


@pytest.mark.thorough
def test_two_signals_end_at_once(tmp_path: Path) -> None:
    with started(tmp_path, *LOCAL, "steps=100000") as command:
        command.until(6)
        for _ in range(2):
            command.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # two signals at once are one to the kernel
        assert command.end()[0] == 128 + signal.SIGTERM


@pytest.mark.thorough
@pytest.mark.parametrize("lost", ["raylet", "gcs_server"])
def test_without_rays_processes_a_run_ends_in_seconds(lost: str, tmp_path: Path) -> None:
    with started(tmp_path, *FAKE, *QUIET, "steps=100000", "checkpoint.every=5") as command:
        own = command.until(8)
        below = own.children(recursive=True)
        assert named_memory([own, *below]) == [], "it would stay in /dev/shm"
        next(process for process in below if process.name() == lost).kill()
        began = time.monotonic()
        code, said = command.end()
        assert code == 1 and len(said) == 1 and f"Ray lost its {NAMES[lost]} ({lost})" in said[0], said
        assert time.monotonic() - began < 30
        wait_for(lambda: not any(lives(process.pid) for process in below), "end of Ray's processes")


@pytest.mark.thorough
def test_all_ends_with_the_process_above(tmp_path: Path) -> None:
    """Ray's agents too, which by themselves would look for a control store, gone as well, for a minute."""
    with started(tmp_path, *FAKE, *QUIET, "steps=100000") as command:
        below = command.until(3).children(recursive=True)
        titles = [" ".join(process.cmdline()) for process in below]
        assert sum("Agent" in title for title in titles) == 2, titles
        command.process.kill()
        wait_for(lambda: not any(lives(process.pid) for process in below), "end of Ray's processes", seconds=30.0)


@pytest.mark.parametrize(
    ("status", "hung", "code", "cause"),
    [
        (signal.SIGSEGV, False, 139, "the run's process crashed (SIGSEGV)"),  # Ray's processes end with it, maybe first
        (signal.SIGKILL, True, 1, "Ray lost its node process (raylet)"),
        (signal.SIGABRT, False, 1, "Ray lost its node process (raylet)"),
        (256, False, 1, "Ray lost its node process (raylet)"),
    ],
)
def test_what_died_first_is_the_cause(
    status: int, hung: bool, code: int, cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parent, "_end_descendants", lambda: 0)  # of this very process
    read, write = os.pipe()
    told = parent.Told(read)
    told.told, told.lost, told.hung = {"ray": "/rays"}, "raylet", hung
    assert parent.speak_for(int(status), told, memory=False) == code
    assert capsys.readouterr().err.startswith(f"asyncrlhf: {cause}")
    os.close(read)
    os.close(write)


LOGGED = """\
[2026-11-28 19:52:27,001 I 17023 17475] accessor.cc:450: Received address and liveness notification for node
	num of failed requests to aggregator: 0
[2026-11-28 19:53:28,881 W 17023 17475] retryable_grpc_client.cc:85: GCS has been unavailable for more than 60 seconds
[2026-11-28 19:53:28,881 E 17023 17475] (python) rpc_client.h:204: Failed to connect to GCS within 60 seconds. GCS may
have been killed. It's either GCS is terminated by `ray stop` or is killed unexpectedly.
"""


@pytest.mark.parametrize(
    ("process", "logged", "cause"),
    [
        (
            17023,
            LOGGED,
            "Ray ended the run's process with exit code 1: Failed to connect to GCS within 60 seconds; its logs",
        ),
        (
            17023,
            "x" * 200_000 + "\n" + LOGGED.replace("(python) ", ""),
            "Ray ended the run's process with exit code 1: ",
        ),
        (
            17023,
            LOGGED[: LOGGED.index("[2026-11-28 19:53:28,881 E")],
            "the run's process ended with exit code 1 in the",
        ),
        (7, LOGGED, "the run's process ended with exit code 1 in the midst of its work"),
    ],
    ids=["an error", "after much else", "no error", "of another process"],
)
def test_what_ray_logged_last_is_the_cause(
    process: int,
    logged: str,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines of Ray 2.60, when the control store of a user's own cluster was gone for a minute."""
    monkeypatch.setattr(parent, "_end_descendants", lambda: 0)  # of this very process
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"python-core-driver-01ff_{process}.log").write_text(logged)
    read, write = os.pipe()
    told = parent.Told(read)
    told.told = {"ray": str(tmp_path), "process": 17023}
    assert parent.speak_for(256, told, memory=False) == 1
    assert capsys.readouterr().err.startswith(f"asyncrlhf: {cause}")
    os.close(read)
    os.close(write)


SCRIPT = """
import sys, asyncrlhf

def loss(tokens):
    if len(tokens.rewards) > 2 and sys.argv[1] == "raises":
        raise RuntimeError("my own")
    return -tokens.advantages * tokens.policy_logprobs

if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    asyncrlhf.train(run_dir="run", overrides={**words, "algorithm.loss.target": "script:loss"})
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["raises", "killed"])
def test_a_script_of_the_python_api_is_spoken_for_too(end: str, tmp_path: Path) -> None:
    """It keeps its traceback where it has one."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "script.py", end, *LOCAL, "steps=100000"]
    with subprocess.Popen(line, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as script:
        metrics = tmp_path / "run/metrics.jsonl"
        if end == "killed":
            wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 6, "step 6")
            beside = next(child for child in psutil.Process(script.pid).children() if "beside" in str(child.cmdline()))
            assert beside.memory_info().rss < 40 * 2**20
            script.kill()
        _, said = script.communicate(timeout=SECONDS)  # of both processes: the pipe ends with the last
    reason = json.loads((tmp_path / "run/summary.json").read_text())["exit_reason"]
    assert not (tmp_path / "run/status.json").exists()
    if end == "raises":
        assert script.returncode == 1 and "RuntimeError: my own" in said and "asyncrlhf: " not in said
        assert "my own" in reason
    else:
        assert "checkpoint.resume=auto goes on from step-" in said
        assert reason.startswith("failed: the run's process ") and verify(tmp_path / "run") == []


OTHERS = """
import os, sys, time, asyncrlhf

def reward(completions, **_):
    open(os.environ["SCORED"], "w").close()
    time.sleep(600)

if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    if sys.argv[1] == "evaluate":
        asyncrlhf.evaluate(reward=reward, overrides=words)
    else:
        asyncrlhf.sweep(overrides={**words, "async.max_staleness": [1, 2], "sweep.jobs": 1})
"""


@pytest.fixture
def temporary() -> Iterator[str]:
    """A folder for the temporary files of a script that is killed, with a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        yield folder


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["evaluate", "sweep"])
def test_an_evaluation_and_a_sweep_of_the_python_api_are_spoken_for(verb: str, tmp_path: Path, temporary: str) -> None:
    (tmp_path / "script.py").write_text(OTHERS)
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": temporary, "SCORED": str(tmp_path / "scored")}
    line = [sys.executable, "script.py", verb, *LOCAL, "steps=100000"]
    with subprocess.Popen(line, cwd=tmp_path, env={**os.environ, **own}, stderr=subprocess.PIPE, text=True) as script:

        def at_work() -> bool:
            records = list(tmp_path.glob("runs/sweeps/*/jobs/*/metrics.jsonl"))
            return (tmp_path / "scored").exists() or any(path.stat().st_size for path in records)

        wait_for(at_work, f"work of the {verb}")
        below = psutil.Process(script.pid).children(recursive=True)
        script.kill()
        _, said = script.communicate(timeout=SECONDS)
    sentences = [line for line in said.splitlines() if line.startswith("asyncrlhf: ")]
    assert len(sentences) == 1 and "the run's process was killed (SIGKILL)" in sentences[0], said
    wait_for(lambda: not any(lives(process.pid) for process in below), "end of what it had started")


def test_the_python_api_does_not_start_its_own_process_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="restarts=2 starts the run's process again, which here is yours; allowed: 0"):
        asyncrlhf.train(run_dir=tmp_path / "run", restarts=2)


# A run on a cluster: it makes steps and dies with it, and then finds it without some of its nodes so many times.
ON_A_CLUSTER = """
import json, os, signal, sys
from pathlib import Path
from asyncrlhf import last_words
from asyncrlhf.cli import parent

parent.LONGEST_BACKOFF = 0.05
folder, address, made, refusals = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def command(further):
    with (folder / "attempts").open("a") as file:
        print(*further, file=file)
    before = len((folder / "attempts").read_text().splitlines()) - 1
    last_words.tell(run_dir=str(folder), restarts=3, cluster=address)
    if not before:
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": 1 + i}) + "\\n" for i in range(made)))
        os.kill(os.getpid(), signal.SIGKILL)
    return parent.REFUSED if before <= refusals else 0

sys.exit(parent.above(command, 3))
"""


@pytest.mark.parametrize(
    ("made", "refusals", "code", "attempts"),
    [(5, 2, 0, 4), (5, 9, parent.REFUSED, 4), (0, 9, parent.REFUSED, 2)],
    ids=["the nodes return", "they do not", "it never had them"],
)
def test_a_cluster_whose_nodes_are_not_all_back_is_tried_again(
    made: int, refusals: int, code: int, attempts: int, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        words = [sys.executable, "-c", ON_A_CLUSTER, str(tmp_path), address, str(made), str(refusals)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == code, ended.stderr
    tried = (tmp_path / "attempts").read_text().splitlines()
    assert tried == ["", *[f"checkpoint.resume=auto run_dir={tmp_path}"] * (attempts - 1)]
    assert ("restarts=3 are spent" in ended.stderr) == (attempts == 4 and code != 0)


@pytest.mark.thorough
def test_a_run_waits_for_a_cluster_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # this machine has one since the first Ray that it started
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        ray_files(),
        head(address),
        started(
            tmp_path, *FAKE, *QUIET, "steps=40", "checkpoint.every=5", "restarts=3", f"ray.address={address}"
        ) as command,
    ):
        own = command.until(8)
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.name() in NAMES and address.rpartition(":")[2] in " ".join(process.cmdline()):
                process.kill()
        said = "".join(command.says("asyncrlhf: waiting for the Ray cluster at "))
        assert "asyncrlhf: Ray lost its node process (raylet); its logs are in " in said
        assert not lives(own.pid)
        with head(address):
            code, said = command.end()
        assert code == 0 and command.reason == "done" and command.steps() == 40, said
        assert verify(command.run_dir) == []


@contextmanager
def head(address: str):  # type: ignore[no-untyped-def]
    """A cluster of one node."""
    node = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={address.rpartition(':')[2]}"]
    node += ["--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    node += ["--node-ip-address=127.0.0.1", f"--temp-dir={os.environ['RAY_TMPDIR']}", "--block"]
    with subprocess.Popen(node, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            wait_for(lambda: listens(address), "cluster", lambda: started.poll() is None)
            yield
        finally:
            left = [started, *psutil.Process(started.pid).children(recursive=True)] if started.poll() is None else []
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as to:
        return to.connect_ex((host, int(port))) == 0


def named_memory(processes: Sequence[psutil.Process]) -> list[str]:
    """Shared memory of these processes that has a name."""
    found = [line for process in processes for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    shared = [line for line in found if "/dev/shm/" in line]
    assert shared, "Ray's object store is there"
    return [line for line in shared if not line.endswith("(deleted)")]


NAMES = {"raylet": "node process", "gcs_server": "control store"}
