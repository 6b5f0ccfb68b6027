"""Sinks run beside the training: they may be slow, hang or fail, and they are given every line in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.metric_names import titled
from asyncrlhf.records.show.mlflow_sink import _allowed
from asyncrlhf.records.show.sinks import RunFacts, Sinks, check_sinks
from tests.loop import FAKE, Finished, run

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
        self.raise_in("start")

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.rows.append(metrics)
        assert threading.current_thread() is self.thread is not threading.main_thread()
        self.raise_in("log")
        if self.facts.config.get("trouble") == "hangs":
            HANGING.wait(30)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.ends.append(summary)
        self.raise_in("finish")

    def raise_in(self, method: str) -> None:
        if self.facts.config.get("trouble") == method:
            raise KeyError("mine")


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


@pytest.mark.parametrize(("trouble", "rows"), [("start", 0), ("log", 1), ("finish", 5)])
def test_a_sink_that_raises_is_ended_and_told_of_once_and_the_run_goes_on(
    tmp_path: Path, mine: list[Mine], trouble: str, rows: int
) -> None:
    sinks, told = Sinks(tmp_path, {"trouble": trouble}, LoggingConfig(sinks=[MINE])), Queue[str]()
    sinks.tell(told.put)
    sinks.log({"step": 0})
    if trouble != "finish":
        assert "stopped recording" in told.get(timeout=30), "no further step, and no end, came first"
    for step in range(1, 5):
        sinks.log({"step": step})
    (sentence,) = sinks.finish({"exit_reason": "done"})[MINE]
    assert len(mine[0].rows) == rows and mine[0].ends == [{"exit_reason": "done"}]
    assert sentence == (
        f"The sink {MINE} stopped recording (KeyError: 'mine'); the run continues without it, and metrics.jsonl has "
        "everything."
    )
    assert told.qsize() == (trouble == "finish")


def test_a_sink_that_hangs_holds_nobody_up(tmp_path: Path, mine: list[Mine]) -> None:
    sinks = Sinks(tmp_path, {"trouble": "hangs"}, LoggingConfig(sinks=[MINE]), seconds=0.05)
    for step in range(5):
        sinks.log({"step": step})
    said = sinks.finish({})
    HANGING.set()
    assert said[MINE] == [f"The sink {MINE} had not finished 0.05 s after the run's end and was left."]


def test_what_a_sink_says_stands_in_the_summary(
    tmp_path: Path, mine: list[Mine], monkeypatch: pytest.MonkeyPatch
) -> None:
    say = {"start": "The disk is full."}
    monkeypatch.setattr(Mine, "raise_in", lambda self, method: method in say and self.facts.say(say[method]))
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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of two steps and a third after a resume, with TensorBoard's files and MLflow's store on the disk."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    pytest.importorskip("mlflow.tracking", reason="the extra mlflow is not installed")
    folder = tmp_path_factory.mktemp("sinks")
    own = (*FAKE, "logging.sinks=[tensorboard,mlflow]", "checkpoint.every=2", "logging.wandb_kwargs={group:study}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder / 'store'}")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need more packages
        run(folder / "run", *own, "steps=2")
        done = run(folder / "run", *own, "steps=3", "checkpoint.resume=auto")
    assert "sinks" not in done.summary, "a sink had something to say"
    return done


def assert_read_back(done: Finished, shown: Callable[[str], dict[int, float]]) -> None:
    """Each value of the run's metrics, by step, under the metric's title."""
    for name in {name for line in done.metrics for name in line} - {"step"}:
        expected = {line["step"]: line[name] for line in done.metrics if line.get(name) is not None}
        if expected:
            found = shown(titled(name))
            assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-5), name


def test_tensorboard_reads_every_metric_back(recorded: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(recorded.folder / "tensorboard")).Reload()
    assert_read_back(recorded, lambda title: {event.step: event.value for event in events.Scalars(title)})
    assert {"heldout/heldout_accuracy", "total/samples"} <= set(events.Tags()["scalars"])
    assert sorted(e.step for e in events.Scalars("heldout/heldout_accuracy")) == [0, 2, 3]


def test_mlflow_reads_every_metric_back(recorded: Finished) -> None:
    from mlflow.tracking import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(f"file:{recorded.folder.parent / 'store'}")
        (made,) = client.search_runs([client.get_experiment_by_name("arithmetic").experiment_id])
        assert made.info.status == "FINISHED" and made.data.params["generator.engine"] == "fake"
        assert made.data.tags["group"] == "study" and made.data.tags["stage"] == "train"
        history = client.get_metric_history
        assert_read_back(recorded, lambda title: {p.step: p.value for p in history(made.info.run_id, _allowed(title))})
    assert len(made.data.params) > 100, "more than a call of MLflow's takes"
    assert _allowed("lag_9+/kl") == "lag_9_/kl"
