"""`asyncrlhf doctor`: broken, hanging and missing packages become sentences; the exit code follows the default run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.cli import doctor

HEALTHY: dict[str, dict[str, Any]] = {
    **{name: {"installed": f"{name} 1.0"} for name in doctor.PROBES},
    "torch": {"installed": "torch 1.0", "gpus": [], "gloo": True, "nccl": False, "cuda_build": None},
}


def examine(**changed: dict[str, Any]) -> dict[str, doctor.Finding]:
    answers = {**HEALTHY, **changed}
    return {finding.what: finding for finding in doctor.examine(lambda name: answers[name])}


def test_a_package_that_crashes_on_import_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: f"{name} 1.0")
    monkeypatch.setattr(
        doctor,
        "PROBES",
        {
            "segfault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "raises": "raise ImportError('libcuda.so is not here')",
            "chatty": "print('noise'); out = {'gloo': True}",
        },
    )
    assert doctor.probe_import("segfault")["error"] == "its import was ended by signal 11"
    assert "libcuda.so is not here" in doctor.probe_import("raises")["error"]
    assert doctor.probe_import("chatty") == {"gloo": True, "installed": "chatty 1.0"}


def test_a_package_that_hangs_on_import_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "hangs 1.0")
    monkeypatch.setattr(doctor, "PROBES", {"hangs": "import threading; threading.Event().wait()"})
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 0.5)
    assert doctor.probe_import("hangs")["error"] == "its import did not end within 0 s"


@pytest.mark.parametrize("name", doctor.NEEDED)
def test_the_default_run_fails_without_what_it_needs(name: str) -> None:
    finding = examine(**{name: {"error": "not installed", "installed": None}})[name]
    assert finding.level == "fails"
    assert "not installed" in finding.sentence


@pytest.mark.parametrize("name", ["vllm", "deepspeed"])
def test_what_the_default_run_does_not_use_is_a_note(name: str) -> None:
    finding = examine(**{name: {"error": "its import fails", "installed": "x 1"}})[name]
    assert finding.level == "note"
    assert "does without it" in finding.sentence


def test_missing_gloo_fails_and_gpus_are_named() -> None:
    torch = {**HEALTHY["torch"], "gpus": ["H200", "H200"], "gloo": False, "nccl": True}
    findings = examine(torch=torch)
    assert findings["GPUs"].found == "H200, H200"
    assert findings["process groups"].level == "fails"


def test_too_little_memory_fails(tmp_path: Path) -> None:
    assert doctor.memory(doctor.GIB).level == "fails"
    assert doctor.memory(8 * doctor.GIB).level == "good"
    assert doctor.tiny_model(tmp_path).level == "fails"


def test_exit_code_and_last_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = [doctor.Finding("torch", "2.13")]
    monkeypatch.setattr(doctor, "examine", lambda: good)
    assert doctor.run() == 0
    assert "should work here" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: [*good, doctor.Finding("disk", "0 GiB", "fails", "Make room.")])
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "Make room." in out and "would fail here: disk." in out


def test_wandb_login_by_key_and_by_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.wandb_login({}).found == "none"
    assert doctor.wandb_login({"WANDB_API_KEY": "x"}).found == "by WANDB_API_KEY"
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert doctor.wandb_login({}).found == "by ~/.netrc"
