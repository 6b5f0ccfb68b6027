"""Checkpoints that are written while the run goes on: of their own step, waited for, or left without a name."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.cluster.local_runtime import LocalLearner
from asyncrlhf.data.checkpoint_manifest import MANIFEST, check_manifest
from asyncrlhf.errors import AsyncRLHFError, CheckpointError, ShortageError
from asyncrlhf.learner.state import state_writer
from asyncrlhf.orchestrator.learning.bookkeeping import WRITE_OUT_SECONDS, Bookkeeping
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.records.write.checkpoint import CheckpointWriter, list_checkpoints
from tests.loop import FAKE, run

SETTINGS = (*FAKE, "eval_every=0", "checkpoint.every=2", "checkpoint.keep=9", "async.max_staleness=2")


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[int, int]]:
    """Have the learner's part reach the disk only after ``seconds`` of the run's clock; returns (step of a checkpoint,
    the learner's version when it is committed)."""
    written, commit, saved = [], CheckpointWriter.commit, LocalLearner.saved
    learners: list[LocalLearner] = []

    async def late(self: LocalLearner) -> Any:
        learners[:] = [self]
        await asyncio.sleep(seconds)
        return await saved(self)

    def noted(self: CheckpointWriter, state: Any, *rest: Any) -> Path:
        written.append((state["version"], learners[0].worker.version))
        return commit(self, state, *rest)

    monkeypatch.setattr(LocalLearner, "saved", late)
    monkeypatch.setattr(CheckpointWriter, "commit", noted)
    return written


def test_a_checkpoint_between_two_publishes_breaks_no_promise(tmp_path: Path) -> None:
    """The rest before it publishes what is not due, and the journal says why; ``run`` verifies."""
    done = run(
        tmp_path,
        *FAKE,
        "eval_every=0",
        "steps=8",
        "checkpoint.every=3",
        "weights.publish_every=4",
        "async.max_staleness=4",
    )
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "rested"] == [3, 6]
    assert [e["version"] for e in events if e["event"] == "published"] == [0, 3, 4, 6, 8]
    done.assert_ledger_whole()


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def contents(checkpoint: Path) -> tuple[Any, Any]:
    """Size and digest of each file, and the controller's part, which is read because it names the folder of its run and
    seals metrics, of which some are real seconds."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["files"]["controller.json"]
    controller = json.loads((checkpoint / "controller.json").read_text())
    del controller["config"]["run_dir"]
    del controller["marker"]["seals"]["metrics.jsonl"]
    return manifest, controller


def test_a_checkpoint_is_of_its_step_though_it_is_written_steps_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        written = slow(patched, 1.25 * WRITE_OUT_SECONDS)
        done = run(tmp_path / "late", *SETTINGS, "steps=6", "learner.virtual_step_seconds=5")
        assert [step for step, _ in written] == [2, 4, 6], "the next one waits, and so does the end"
        assert written[0][1] > 2, "the run did not go on meanwhile, so nothing is tried"
    done.assert_ledger_whole()
    with monkeypatch.context() as patched:
        slow(patched, 0.01)
        run(tmp_path / "hardly late", *SETTINGS, "steps=6", "learner.virtual_step_seconds=5")
    first, late = (tmp_path / name / "checkpoints/step-00000002" for name in ("hardly late", "late"))
    assert contents(first) == contents(late), "every file of it is the same"
    for checkpoint in list_checkpoints(tmp_path / "late"):
        check_manifest(checkpoint)
    resume = f"checkpoint.resume={tmp_path}/late/checkpoints/step-00000002"
    again = run(tmp_path / "late", *SETTINGS, "steps=6", resume)
    again.assert_ledger_whole()
    assert [row["step"] for row in again.metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, ["step-00000002"]), (1e4, [])])
def test_a_run_that_fails_meanwhile_lets_it_come_to_its_end_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[str]
) -> None:
    slow(monkeypatch, seconds)
    step = LearnLoop._step

    async def fail(self: LearnLoop, *arguments: Any) -> None:
        if self.state.version == 2:
            raise AsyncRLHFError("The third step fails.")
        await step(self, *arguments)

    monkeypatch.setattr(LearnLoop, "_step", fail)
    with pytest.raises(AsyncRLHFError, match="third step fails"):
        run(tmp_path, *SETTINGS, "steps=6")
    assert names(tmp_path) == expected
    monkeypatch.undo()
    if expected:
        run(tmp_path, *SETTINGS, "steps=4", "checkpoint.resume=auto").assert_ledger_whole()


def test_a_full_disk_ends_the_run_in_one_sentence_and_the_checkpoint_before_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write_file = [], state_writer.write_file

    def full(path: Path, *rest: Any) -> dict[str, Any]:
        written.append(path)
        if "step-00000004" in str(path):
            raise OSError(28, os.strerror(28))
        return write_file(path, *rest)

    monkeypatch.setattr(state_writer, "write_file", full)
    with pytest.raises(ShortageError, match=r"^The disk is full: ") as failed:
        run(tmp_path, *SETTINGS, "steps=8")
    cause = failed.value.__cause__
    assert isinstance(cause, CheckpointError)
    assert re.search(r"step-00000004.*could not be written: .*No space left on device", str(cause))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"] == f"failed: {failed.value}"
    assert names(tmp_path) == ["step-00000002"] and (tmp_path / "checkpoints/.step-00000004.tmp").exists()
    monkeypatch.undo()
    again = run(tmp_path, *SETTINGS, "steps=4", "checkpoint.resume=auto")
    again.assert_ledger_whole()
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert not list((tmp_path / "checkpoints").glob(".*.tmp"))


async def test_a_rollback_awaits_the_checkpoint_that_is_about_to_get_its_name() -> None:
    """Its thread cannot be stopped: looked for too early, the newest checkpoint would be the one before."""
    begun, go_on, written = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def commit(*_: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        written.append("step-00000004")

    async def nothing() -> dict[str, Any]:
        return {}

    state: Any = SimpleNamespace(journal=SimpleNamespace(note=lambda *_, **__: None), progressed=lambda: None)
    runtime: Any = SimpleNamespace(learner=SimpleNamespace(saved=nothing))
    runtime.save_rollouts = lambda *_: SimpleNamespace(result=lambda: None)
    log: Any = SimpleNamespace(flush=nothing, written=lambda files: nothing())
    writer: Any = SimpleNamespace(rollouts=Path(), folder=Path(), commit=commit)
    recorder: Any = SimpleNamespace(sealed=lambda marker: marker)
    rest: Any = [None] * 6
    bookkeeping = Bookkeeping(state, runtime, rest[0], rest[1], rest[2], rest[3], rest[4], log, recorder, rest[5])
    document: Any = {"version": 4}
    bookkeeping._writing = asyncio.create_task(bookkeeping._write(writer, document, [], rest[0]))
    await asyncio.wait_for(begun.wait(), 60)
    given_up = asyncio.create_task(bookkeeping.give_up_writing())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not given_up.done(), "the rollback goes on although the checkpoint is being named"
    go_on.set()
    await asyncio.wait_for(given_up, 60)
    assert written == ["step-00000004"] and state.saved_version == 4
