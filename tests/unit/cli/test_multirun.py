"""``train -m`` with a launcher that runs jobs in other processes: one report, and the exit code of the worst job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins import basic_launcher
from hydra.core.utils import JobReturn, JobStatus, run_job

from asyncrlhf.cli import multirun
from asyncrlhf.cli.main import main
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError


def in_its_own_process(**arguments: Any) -> JobReturn:
    """As Hydra's launchers for joblib or Slurm: no memory of the job comes back, and not even this if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            run_job(**arguments)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return JobReturn(status=JobStatus.COMPLETED)


def fake_run(config: RunConfig) -> int:
    if config.steps == 2:
        raise ConfigError("no such luck")
    if config.steps == 3:
        raise ZeroDivisionError("nor here")
    if config.steps == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("steps", "code", "said"),
    [
        ("5,6", 0, []),
        ("5,6,2", 2, ["steps=2: no such luck"]),
        ("5,6,3", 1, ["steps=3: ZeroDivisionError: nor here. The trace is in"]),
        ("5,6,4", 1, ["1 of the 3 jobs ended without a result."]),
    ],
)
@pytest.mark.more_but(every=2)
def test_jobs_of_a_launcher_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], steps: str, code: int,
    said: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(basic_launcher, "run_job", in_its_own_process)
    monkeypatch.setattr(multirun, "run", fake_run)
    monkeypatch.setattr(multirun, "draw", lambda runs, out: f"drawn {[run.name for run in runs]}")
    assert main(["train", "-m", "name=two", f"steps={steps}"]) == code
    out, err = capfd.readouterr()
    assert "drawn ['0', '1']" in out
    assert all(sentence in err for sentence in said) and err.count("\n") == len(said)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    traces = list(tmp_path.glob("runs/**/asyncrlhf-error-*.txt"))
    assert len(traces) == err.count("The trace is in") and all(str(trace) in err for trace in traces)
