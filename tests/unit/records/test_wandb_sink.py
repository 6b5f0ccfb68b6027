"""W&B offline: a run is recorded, its process ends, and no trouble with W&B reaches the training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.records.wandb_sink import WandbSink, grouped_name


def wandb_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]


def test_curves_are_grouped() -> None:
    assert grouped_name("staleness_max") == "staleness/staleness_max"
    assert grouped_name("reward_mean") == "reward/reward_mean"
    assert grouped_name("something_new") == "other/something_new"
    assert grouped_name("step") == "step"


def test_offline_runs_are_written_and_a_second_one_keeps_the_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "arithmetic" / "today"
    run_dir.mkdir(parents=True)
    for first_step in (1, 4):  # a run, and its resumption
        sink = WandbSink(run_dir, {"async": {"max_staleness": 2}}, LoggingConfig())
        for step in range(first_step, first_step + 3):
            sink.log({"step": step, "reward_mean": 0.5, "loss": float("nan")})
        sink.finish({"reward": {"last": 0.5}})
        sink.finish()
        sink.log({"step": 99})
        assert sink.note is None
        assert wandb_processes() == []
    files = list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert files and len({path.name for path in files}) == 1
    written = b"".join(path.read_bytes() for path in files)
    for name in (b"reward/reward_mean", b"max_staleness", b"last"):
        assert name in written
    assert b"policy/loss" not in written  # NaN is left out
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_disabled_does_nothing(tmp_path: Path) -> None:
    sink = WandbSink(tmp_path, {}, LoggingConfig(wandb="disabled"))
    sink.log({"step": 1})
    sink.finish({})
    assert sink.note is None and list(tmp_path.iterdir()) == []


def test_online_without_a_login_is_recorded_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-settings"))
    sink = WandbSink(tmp_path / "run", {}, LoggingConfig(wandb="online"))
    sink.finish({})
    assert sink.note is not None and "no W&B login was found" in sink.note
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_trouble_with_wandb_never_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    import wandb

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    class Run:
        summary: dict[str, Any] = {}  # noqa: RUF012

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        log = fail if broken == "log" else define_metric
        finish = fail if broken == "finish" else define_metric

    monkeypatch.setattr(wandb, "setup", lambda *_: None)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    monkeypatch.setattr(wandb, "init", fail if broken == "init" else lambda **_: Run())
    sink = WandbSink(tmp_path, {}, LoggingConfig())
    for step in range(3):
        sink.log({"step": step})
    sink.finish({})
    assert sink.note == "W&B stopped recording (ConnectionError: no route to host); the run goes on without it."
