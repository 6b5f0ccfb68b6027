"""W&B offline: what a run logs can be read back whole, a resumed run goes on, its process ends, and no trouble with W&B
reaches the training run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.records.show import wandb_sink
from asyncrlhf.records.show.metric_names import OF_THE_ALGORITHM, section_of, titled
from asyncrlhf.records.show.sinks import Sinks
from tests.loop import FAKE, Finished, run
from tests.processes import lives
from tests.wandb_file import axes, history, records, run_of
from tests.wandb_server import WandbServer

ROOT = Path(__file__).resolve().parents[3]
LOGGED = (
    *FAKE,
    "logging.wandb=offline",
    "eval_every=2",
    "checkpoint.every=3",
    "algorithm=gspo",
    "async.max_staleness=2",
)


def wandb_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]


def files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Six steps, then two more of the same run."""
    folder = tmp_path_factory.mktemp("sweep") / "lag-2"
    keywords = "entity:us,group:study,job_type:quality,tags:['lag=2','seed=0'],notes:'a, b'"
    named = (f"logging.wandb_kwargs={{{keywords}}}",)
    first = run(folder, *LOGGED, *named, "steps=6", "logging.wandb_model=true")
    assert "sinks" not in first.summary
    return run(folder, *LOGGED, *named, "steps=8", "checkpoint.resume=auto")


def test_every_metric_is_read_back_with_its_value(logged: Finished) -> None:
    rows: dict[int, dict[str, Any]] = {}
    for path in files(logged.folder):
        for row in history(path):
            assert row["_step"] == row["step"]
            rows[row["step"]] = row
    assert sorted(rows) == list(range(9)) and [line["step"] for line in logged.metrics] == list(range(1, 9))
    for line in logged.metrics:
        for name, value in line.items():
            found = rows[line["step"]].get(titled(name))
            assert found == pytest.approx(value) if value is not None else found is None, name
    sequences = [line["sequences"] for line in logged.metrics]
    assert [rows[s]["total/samples"] for s in range(1, 9)] == [sum(sequences[:s]) for s in range(1, 9)]
    assert rows[8]["total/tokens"] == sum(line["response_tokens"] for line in logged.metrics)


def test_the_ends_are_evaluated_and_a_resumed_run_keeps_the_first_baseline(logged: Finished) -> None:
    first, second = files(logged.folder)
    heldout = "heldout/heldout_accuracy"
    before = {row["step"]: row[heldout] for row in history(first) if heldout in row}
    assert sorted(before) == [0, 2, 4, 6]
    after = {row["step"]: row[heldout] for row in history(second) if heldout in row}
    assert sorted(after) == [8]
    told = logged.summary["heldout_accuracy"]
    assert (told["before"], told["after"]) == (before[0], after[8])
    assert run_of(first).run_id == run_of(second).run_id


def test_every_metric_has_its_section_and_the_axis_of_steps(logged: Finished) -> None:
    bound = axes(files(logged.folder)[0])
    metrics = {titled(name) for line in logged.metrics[:6] for name, value in line.items() if value is not None}
    assert {"lag_0/kl", "heldout/heldout_accuracy", "total/tokens"} <= bound.keys()
    assert all(bound.get(name) == "step" for name in (metrics | {"total/tokens"}) - {"step"})
    assert not [name for line in logged.metrics for name in line if section_of(name) == OF_THE_ALGORITHM]


def test_the_run_has_its_names_its_completions_and_its_model(logged: Finished) -> None:
    first = files(logged.folder)[0]
    found = run_of(first)
    assert (found.entity, found.project, found.run_group, found.job_type) == ("us", "asyncrlhf", "study", "quality")
    assert found.display_name.endswith("/lag-2") and list(found.tags) == ["lag=2", "seed=0"] and found.notes == "a, b"
    table = next(row["completions"] for row in history(first) if "completions" in row)
    assert table["_type"] == "table-file" and table["nrows"] == 16 and table["ncols"] == 7
    models = [r.artifact for r in records(first) if r.HasField("artifact") and r.artifact.type == "model"]
    assert len(models) == 1 and any("safetensors" in entry.path for entry in models[0].manifest.contents)
    assert wandb_processes() == []


@pytest.mark.parametrize(
    "metric, section",
    [
        ("staleness_in_queue_mean", "staleness"), ("reference_latency_p95", "time"), ("critic_latency_p50", "time"),
        ("reference_prefill_evictions", "time"), ("generators_held_back", "buffer"), ("heldout_loss", "heldout"),
        ("lag_3-4/kl", "lag_3-4"), ("reward/rule", "reward"), ("behavior_weight_mean", "off_policy"),
        ("margin", "stage"), ("value_loss", "policy"), ("normalized_reward_std", "reward"),
        ("policy_version", "time"), ("mine", "algorithm"),
    ],
)  # fmt: skip
def test_sections(metric: str, section: str) -> None:
    assert section_of(metric) == section


def test_disabled_does_nothing(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path, {}, LoggingConfig(wandb="disabled"))
    sinks.log({"step": 1})
    assert sinks.finish({}) == {} and list(tmp_path.iterdir()) == []


def test_online_without_a_login_is_recorded_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-settings"))
    sinks = Sinks(tmp_path / "run", {}, LoggingConfig(wandb="online"))
    sinks.log({"step": 1, "loss": float("nan"), "entropy": 1.5})
    said = sinks.finish({})
    told: list[str] = []
    sinks.tell(told.append)
    assert "no W&B login was found" in said["wandb"][0] and told == said["wandb"]
    (file,) = files(tmp_path / "run")
    (row,) = history(file)
    assert row["policy/entropy"] == 1.5 and "policy/loss" not in row
    captured = capfd.readouterr()
    assert captured.out == captured.err == "" and wandb_processes() == []


STRIKE = """
import json, signal, sys, time
import psutil
from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.records.show.sinks import Sinks

def core():
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("wandb-")]

sinks = Sinks(sys.argv[1], {}, LoggingConfig(wandb="offline"), seconds=3)
sinks.log({"step": 1})
limit = time.monotonic() + 60
while not list(__import__("pathlib").Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    assert time.monotonic() < limit, "W&B has not begun a file"
    time.sleep(0.05)
struck = core()
for process in struck:
    process.send_signal(getattr(signal, sys.argv[2]))
sinks.log({"step": 2})
print(json.dumps([sinks.finish({})["wandb"], [p.pid for p in struck]]), flush=True)
"""


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("struck", "sentence"),
    [
        ("SIGKILL", "The sink wandb stopped recording ("),
        pytest.param("SIGSTOP", "had not finished 3 s after the run's end", marks=pytest.mark.more),
    ],
)
def test_the_process_of_wandb_killed_or_frozen(tmp_path: Path, struck: str, sentence: str) -> None:
    """Said in one sentence; the command ends, and with it every process of W&B: else its output would stay open."""
    words = [sys.executable, "-c", STRIKE, str(tmp_path), struck]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    said, processes = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 1 and sentence in said[0], said
    assert processes and not any(lives(pid) for pid in processes)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_server_that_is_not_reached_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own process tries again and writes so into its log; the run's end comes before it is through."""
    import wandb

    log = tmp_path / "debug-internal.log"

    class Settings:
        log_internal = str(log)
        sync_dir = "run/wandb/run-1"

    class Run:
        settings = Settings()
        summary: dict[str, Any] = {}  # noqa: RUF012

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, row: dict[str, Any], **_: Any) -> None:
            with log.open("a") as file:
                file.write('{"msg":"api: retrying HTTP error"}\n' if row.get("step") else '{"msg":"fine"}\n')

        def finish(self, **_: Any) -> None:
            raise TimeoutError("Timed out finishing run.")

    monkeypatch.setattr(wandb, "setup", lambda *_: None)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", lambda **_: Run())
    sinks = Sinks(tmp_path, {}, LoggingConfig(wandb="online"))
    for step in range(4):
        sinks.log({"step": step})
    said = sinks.finish({})["wandb"]
    assert len(said) == 2 and "is not reached" in said[0] and "had not received everything" in said[1]
    assert all("nothing is lost: wandb sync --include-online run/wandb/run-1 " in sentence for sentence in said)


@pytest.fixture
def server() -> Iterator[WandbServer]:
    found = WandbServer()
    yield found
    found.kill()


def synced(command: list[str], server: WandbServer) -> None:
    """Run W&B's own command, which reads the files with W&B's own reader."""
    words = [str(Path(sys.executable).with_name("wandb")), *command[1:]]
    done = subprocess.run(words, env={**os.environ, **server.environment}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_wandb_itself_sends_every_metric_of_a_resumed_run(logged: Finished, server: WandbServer) -> None:
    """The documented command; the second part must not replace the first one's lines."""
    parts = [str(path.parent) for path in files(logged.folder)]
    synced(["wandb", "sync", "--include-synced", "--entity", "me", *parts], server)
    ((run_id, sent),) = server.history.items()
    assert [row["step"] for _, row in sorted(sent.items())] == list(range(9))
    for line in logged.metrics:
        row = next(row for row in sent.values() if row["step"] == line["step"])
        for name, value in line.items():
            assert value is None or row[titled(name)] == pytest.approx(value), name
    made = server.runs[run_id]
    assert (made["groupName"], made["jobType"], made["notes"]) == ("study", "quality", "a, b")
    assert made["tags"] == ["lag=2", "seed=0"] and made["displayName"].endswith("/lag-2")


@pytest.mark.thorough
def test_nothing_is_lost_if_the_network_fails_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: WandbServer
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb_sink, "FINISH_TIMEOUT", 2.0)
    monkeypatch.setattr(wandb_sink, "_TRYING_AGAIN", ())  # a table is tried before W&B's own log tells of the network
    table = pa.Table.from_pylist([dict.fromkeys(wandb_sink.COMPLETION_COLUMNS)])
    rollouts = tmp_path / "run" / "rollouts"
    rollouts.mkdir(parents=True)
    sinks = Sinks(tmp_path / "run", {}, LoggingConfig(wandb="online"))
    sinks.log({"step": 1, "loss": 0.5})
    limit = time.monotonic() + 60
    while not server.runs:
        assert time.monotonic() < limit, "W&B has not begun"
        time.sleep(0.05)
    server.kill()
    pq.write_table(table, rollouts / "part-000.parquet")
    for step in range(2, 5):
        sinks.log({"step": step, "loss": 0.5 / step})
    said = sinks.finish({"exit_reason": "done"})["wandb"]
    assert "W&B's server is not reached" in said[0] and not any("stopped recording" in sentence for sentence in said)
    command = said[0].split("nothing is lost: ")[1].removesuffix(" sends it later.").split()
    back = WandbServer()
    try:
        synced(command, back)
        (sent,) = back.history.values()
    finally:
        back.kill()
    assert {row["step"]: row["policy/loss"] for row in sent.values()} == {s: 0.5 / s for s in range(1, 5)}


@pytest.mark.in_turn
@pytest.mark.more
def test_a_server_that_is_not_there_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = WandbServer()
    gone.kill()
    for name, value in gone.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb_sink, "INIT_TIMEOUT", 3.0)
    sinks = Sinks(tmp_path / "run", {}, LoggingConfig(wandb="online"))
    sinks.log({"step": 1, "loss": 0.5})
    (sentence,) = sinks.finish({"exit_reason": "done"})["wandb"]
    assert "could not be reached" in sentence and "recorded offline" in sentence
    (file,) = files(tmp_path / "run")
    assert f"nothing is lost: wandb sync {file.parent} sends it later." in sentence
    back = WandbServer()
    try:
        synced(["wandb", "sync", str(file.parent)], back)
        (sent,) = back.history.values()
    finally:
        back.kill()
    assert [row["policy/loss"] for row in sent.values()] == [0.5]
