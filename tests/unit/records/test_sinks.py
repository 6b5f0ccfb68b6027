"""Sinks run beside the training: they may be slow, hang or fail, and they are given every line in order."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.metric_names import titled
from asyncrlhf.records.show.sink import RunFacts
from asyncrlhf.records.show.sinks import Sinks, check_sinks
from tests.loop import FAKE, run

MINE = f"{__name__}:Mine"
HANGING = threading.Event()


class Mine:
    """Keeps what it is given; its trouble is chosen by the config that it is started with."""

    made: list[Mine] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.ends: list[Mapping[str, Any]] = []
        self.thread = threading.current_thread()
        Mine.made.append(self)

    def start(self, run: RunFacts) -> None:
        self.facts = run

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.rows.append(metrics)
        assert threading.current_thread() is self.thread is not threading.main_thread()
        if self.facts.config.get("trouble") == "raises":
            raise KeyError("mine")
        if self.facts.config.get("trouble") == "hangs":
            HANGING.wait(30)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.ends.append(summary)


@pytest.fixture
def mine() -> list[Mine]:
    Mine.made.clear()
    return Mine.made


def test_a_users_sink_gets_every_line_and_the_ends(tmp_path: Path, mine: list[Mine]) -> None:
    found = run(tmp_path / "run", *FAKE, f"logging.sinks=['{MINE}']", "steps=2", "logging.wandb=offline")
    (sink,) = mine
    assert [row["step"] for row in sink.rows] == [0, 1, 2, 2]
    lines = [{key: value for key, value in line.items() if value is not None} for line in found.metrics]
    totals = ("total/samples", "total/tokens")
    assert [{k: v for k, v in row.items() if k not in totals} for row in sink.rows[1:3]] == lines
    assert [row.get("total/samples") for row in sink.rows] == [None, 16.0, 32.0, 32.0]
    assert sink.rows[0]["heldout_accuracy"] == found.summary["heldout_accuracy"]["before"]
    assert sink.rows[3]["heldout_accuracy"] == found.summary["heldout_accuracy"]["after"]
    assert sink.rows[3]["wall_time"] == found.metrics[-1]["wall_time"]
    assert sink.ends == [found.summary] and sink.facts.stage == "train" and sink.facts.config["steps"] == 2
    assert not (tmp_path / "run" / "wandb").exists()


def test_a_sink_that_raises_is_ended_and_named_and_the_run_goes_on(tmp_path: Path, mine: list[Mine]) -> None:
    sinks = Sinks(tmp_path, {"trouble": "raises"}, LoggingConfig(sinks=[MINE]))
    for step in range(5):
        sinks.log({"step": step})
    said = sinks.finish({"exit_reason": "done"})
    assert len(mine[0].rows) == 1 and mine[0].ends == [{"exit_reason": "done"}]
    assert len(said[MINE]) == 1 and "stopped recording (KeyError: 'mine')" in said[MINE][0]


def test_a_sink_that_hangs_holds_nobody_up(tmp_path: Path, mine: list[Mine]) -> None:
    sinks = Sinks(tmp_path, {"trouble": "hangs"}, LoggingConfig(sinks=[MINE]), seconds=0.05)
    for step in range(5):
        sinks.log({"step": step})
    said = sinks.finish({})
    HANGING.set()
    assert said[MINE] == [f"The sink {MINE} had not finished 0.05 s after the run's end and was left."]


def test_the_loss_of_a_sink_is_told_when_it_happens_and_not_again(tmp_path: Path, mine: list[Mine]) -> None:
    sinks, told = Sinks(tmp_path, {"trouble": "raises"}, LoggingConfig(sinks=[MINE])), Queue[str]()
    sinks.tell = told.put
    sinks.log({"step": 0})
    sinks.log({"step": 1})
    assert "stopped recording" in told.get(timeout=30), "no further step, and no end, had to come first"
    assert sinks.news() == [] and len(sinks.finish({})[MINE]) == 1 and told.empty()


def test_what_a_sink_says_stands_in_the_summary(
    tmp_path: Path, mine: list[Mine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mine, "start", lambda self, run: run.say("The disk is full."))
    monkeypatch.setattr(Mine, "log", lambda self, metrics: None)
    found = run(tmp_path / "run", *FAKE, f"logging.sinks=['{MINE}']", "steps=1")
    assert found.summary["sinks"] == {MINE: ["The disk is full."]}
    assert '"The disk is full."' in (found.folder / "summary.json").read_text()


@pytest.mark.parametrize(
    "sink, sentence",
    [
        ("wandbb", "logging.sinks=wandbb is not known (did you mean wandb?)"),
        ("no_such_module:Sink", "logging.sinks=no_such_module:Sink cannot be imported"),
        ("tensorboard", "logging.sinks=tensorboard needs the package tensorboard, which is not installed"),
        ("mlflow", "logging.sinks=mlflow needs the package mlflow, which is not installed: pip install 'asyncrlhf[ml"),
    ],
)  # fmt: skip
def test_a_sink_that_cannot_be_is_answered_in_a_sentence(
    sink: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        check_sinks(LoggingConfig(sinks=[sink]))
    assert str(refused.value).startswith(sentence)


def test_tensorboard_reads_every_metric_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own = (*FAKE, "logging.sinks=[tensorboard]", "checkpoint.every=2")
    run(tmp_path / "run", *own, "steps=2")
    found = run(tmp_path / "run", *own, "steps=3", "checkpoint.resume=auto")
    events = EventAccumulator(str(found.folder / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    for name in {name for line in found.metrics for name in line} - {"step"}:
        expected = {line["step"]: line[name] for line in found.metrics if line.get(name) is not None}
        if expected:
            shown = {event.step: event.value for event in events.Scalars(titled(name))}
            assert {step: shown[step] for step in expected} == pytest.approx(expected, rel=1e-5), name
    assert {"heldout/heldout_accuracy", "total/samples"} <= tags
    assert sorted(e.step for e in events.Scalars("heldout/heldout_accuracy")) == [0, 2, 3]


class FakeClient:
    """Stands for MLflow's client: keeps what it is given, and refuses what a server would."""

    runs: dict[str, Any] = {}  # noqa: RUF012

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"experiment {name}"

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"experiment": experiment, "tags": tags, "params": {}, "metrics": {}, "status": "RUNNING"}
        return type("Made", (), {"info": type("Info", (), {"run_id": run_id})})

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        self.runs[run_id]["params"] |= dict(params)
        for key, value, _, step in metrics:
            assert "+" not in key
            self.runs[run_id]["metrics"].setdefault(key, {})[step] = value

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


def test_mlflow_gets_settings_and_metrics_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from types import ModuleType

    modules = {name: ModuleType(name) for name in ("mlflow", "mlflow.tracking", "mlflow.entities")}
    modules["mlflow.tracking"].MlflowClient = FakeClient  # type: ignore[attr-defined]
    modules["mlflow.entities"].Metric = lambda *facts: facts  # type: ignore[attr-defined]
    modules["mlflow.entities"].Param = lambda *facts: facts  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    FakeClient.runs.clear()
    config = {"name": "sums", "async": {"max_staleness": 2}, "logging": {"wandb_kwargs": {"group": "study"}}}
    for first, reason in ((1, "interrupted"), (3, "done")):
        sinks = Sinks(tmp_path, config, LoggingConfig(sinks=["mlflow"]))
        for step in (first, first + 1):
            sinks.log({"step": step, "reward_mean": step / 10, "lag_9+/kl": 0.5})
        assert sinks.finish({"exit_reason": reason}) == {}
    (found,) = FakeClient.runs.values()
    assert found["experiment"] == "experiment sums" and found["params"]["async.max_staleness"] == "2"
    assert found["metrics"]["reward/reward_mean"] == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert found["metrics"]["lag_9_/kl"][4] == 0.5 and found["tags"] == {"stage": "train", "group": "study"}
    assert found["status"] == "FINISHED"


def test_mlflow_reads_every_metric_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real package and a store on the disk, over a resume."""
    pytest.importorskip("mlflow.tracking", reason="the extra mlflow is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need more packages
    own = (*FAKE, "logging.sinks=[mlflow]", "checkpoint.every=2", "logging.wandb_kwargs={group:study}")
    run(tmp_path / "run", *own, "steps=2")
    found = run(tmp_path / "run", *own, "steps=3", "checkpoint.resume=auto")
    assert "sinks" not in found.summary, "the sink had something to say"
    client = MlflowClient()
    (made,) = client.search_runs([client.get_experiment_by_name("arithmetic").experiment_id])
    assert made.info.status == "FINISHED" and made.data.params["generator.engine"] == "fake"
    assert made.data.tags["group"] == "study" and made.data.tags["stage"] == "train"
    for name in {name for line in found.metrics for name in line} - {"step"}:
        expected = {line["step"]: line[name] for line in found.metrics if line.get(name) is not None}
        key = titled(name).replace("+", "_")
        shown = {point.step: point.value for point in client.get_metric_history(made.info.run_id, key)}
        assert {step: shown[step] for step in expected} == pytest.approx(expected), name
