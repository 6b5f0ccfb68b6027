"""``asyncrlhf doctor --gpu``: its checks made on the CPU (gloo for NCCL), its failures, and a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config
from asyncrlhf.doctor import gpu_check
from asyncrlhf.doctor.gpu_check import CHECKS, RUN, Check, Result, conclusions, examine
from tests.loop import FAKE, QUIET

LOCAL = ("runtime=local", *QUIET, *FAKE, "steps=4")


def named(*checks: Check, cards: int = 2, limit: float = 120.0) -> dict[str, Result]:
    return {result.name: result for result in examine(checks, cards, LOCAL, limit, tell=lambda line: None)}


def test_without_a_gpu_it_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 2
    said = capsys.readouterr().err
    assert "torch finds none on this machine" in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("check", [c for c in CHECKS if not c.words], ids=lambda check: check.name)
def test_the_runs_are_settings_that_a_machine_with_gpus_takes(check: Check) -> None:
    config = load_config([*RUN, *check.overrides, "reward.kind=python", "model.path=tiny"])
    parts = config.learner.ranks * config.learner.gpus
    engines = config.generator.gpus * config.generator.replicas
    shared = config.cluster.placement == "flatten"
    assert check.name != "one gpu" or (config.cluster.placement == "one_gpu" and config.async_.mode == "async")
    assert check.cards == (max(parts, engines) if shared else parts + engines)


@pytest.mark.more
def test_a_broadcast_is_measured_and_what_fails_or_hangs_stops_no_other() -> None:
    hangs = Check("hangs", "", 1, words=("rank", "cpu", "8", "1", "1"))  # its rank 0 never comes
    found = named(hangs, limit=2) | named(
        Check("broken", "", 1, words=("step", "no such shape", "cpu", "64")),
        Check("four", "", 4, words=("broadcast", "cpu", "8")),
        Check("broadcast", "", 2, words=("broadcast", "cpu", str(2**20))),
    )
    assert found["broken"].state == "failed" and "no such shape" in found["broken"].sentence
    assert found["hangs"].state == "failed" and "did not end within 2 s" in found["hangs"].sentence
    assert found["four"].state == "not run" and found["four"].sentence == "needs 4 GPUs; this machine has 2."
    assert found["broadcast"].state == "passed" and found["broadcast"].figures["bytes_per_second"] > 1e6


@pytest.mark.thorough
def test_a_step_and_runs_are_measured() -> None:
    found = named(
        Check("step", "", 1, words=("step", "2m", "cpu", "256")),
        Check("sync", "", 1, "2m", ("async=sync",)),
        Check("async", "", 1, "2m", ("async=async",)),
        Check("nonsense", "", 1, "2m", ("async.mode=nonsense",)),
    )
    assert found["step"].figures["flops"] > 1e6
    assert {name: result.state for name, result in found.items()} == {
        "step": "passed", "sync": "passed", "async": "passed", "nonsense": "failed",
    }  # fmt: skip
    assert "async.mode" in found["nonsense"].sentence and "exit code 2" in found["nonsense"].sentence
    assert found["async"].figures["tokens_per_second"] > 0
    said = conclusions(list(found.values()))
    assert any("times as many tokens" in sentence for sentence in said) and said[-1] == "3 passed, 1 failed, 0 not run."


def test_records_that_do_not_hold_fail_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "verify", lambda folder: ["rollout 3 was trained twice."])
    with pytest.raises(RuntimeError, match="do not hold: rollout 3"):
        gpu_check.figures_of(tmp_path)
