"""A full disk ends a run with its name, wherever it is met, and costs nothing that was written before."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.errors import AsyncRLHFError, shortage
from asyncrlhf.records.write import recorder, rollout_rows
from asyncrlhf.records.write.checkpoint import CheckpointWriter
from asyncrlhf.records.write.recorder import RunRecorder, read_metrics
from asyncrlhf.records.write.run_lock import RunLock
from tests.loop import FAKE, QUIET, run

Patch = pytest.MonkeyPatch


def full(*_: Any, **__: Any) -> None:
    """What the system says of a full disk, by its own device for that."""
    with open("/dev/full", "w", buffering=1) as device:
        device.write("x\n")


def metrics(patch: Patch) -> None:
    log_step = RunRecorder.log_step

    def limited(self: RunRecorder, row: dict[str, Any]) -> None:
        if row["step"] == 4:
            self._metrics.close()
            self._metrics = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115
        log_step(self, row)

    patch.setattr(RunRecorder, "log_step", limited)


def parts(patch: Patch) -> None:
    write = rollout_rows.pq.write_table
    calls: list[Path] = []

    def limited(table: Any, target: Path, **options: Any) -> None:
        calls.extend([target] if Path(target).parent.name == "rollouts" else [])
        if len(calls) > 2 and target == calls[-1]:
            Path(target).write_bytes(b"half")
            full()
        write(table, target, **options)

    patch.setattr(rollout_rows.pq, "write_table", limited)


def checkpoints(patch: Patch) -> None:
    commit = CheckpointWriter.commit

    def limited(self: CheckpointWriter, *arguments: Any) -> Any:
        if self.folder.name != ".step-00000002.tmp":
            full()
        return commit(self, *arguments)

    patch.setattr(CheckpointWriter, "commit", limited)


@pytest.mark.in_turn
@pytest.mark.parametrize("fill", [metrics, parts, checkpoints])
@pytest.mark.more_but(every=3)
def test_a_full_disk_is_the_cause_that_is_told_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str], fill: Callable[[Patch], None]
) -> None:
    words = [*FAKE, *QUIET, "runtime=local", "steps=6", "checkpoint.every=2", "logging.flush_every=16"]
    with monkeypatch.context() as patch:
        fill(patch)
        assert main(["train", *words, f"run_dir={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("asyncrlhf: The disk is full") and said.count("\n") == 1 and "Traceback" not in said
    assert f"The disk is full: {tmp_path}{'/metrics.jsonl' if fill is metrics else ''} could not be written." in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"].startswith("failed: The disk is full")
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
    assert sum(len(pq.read_table(part)) for part in tmp_path.glob("rollouts/part-*.parquet")) >= 32
    assert [path.name for path in tmp_path.rglob("*.tmp") if path.is_file()] == []
    again = run(
        tmp_path,
        *FAKE,
        "model.path=tiny",
        "steps=6",
        "checkpoint.every=2",
        "logging.flush_every=16",
        "checkpoint.resume=auto",
    )
    again.assert_ledger_whole()
    assert again.summary["ledger"]["trained"] == 6 * 16


def test_a_summary_without_room_lets_the_folder_go_and_leaves_no_half(tmp_path: Path, monkeypatch: Patch) -> None:
    def no_room(path: Path, text: str) -> None:
        folder = path.parent / "not there" if path.name == "summary.json" else path.parent
        recorder_write(folder / path.name, text)

    recorder_write = recorder.write_atomically
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            recorder.write_atomically(tmp_path / "summary.json", "{}")
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "write_atomically", no_room)
        with pytest.raises(OSError):
            run(tmp_path, *FAKE, "steps=1")
    RunLock(tmp_path).release()


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), True),
        (OSError(errno.EIO, "Input/output error", "/data/x"), True),
        (OSError(errno.EIO, "Input/output error"), False),  # of a terminal that is gone
        (
            RuntimeError('Error while serializing: I/O error: Os { code: 28, kind: StorageFull, message: "No space"}'),
            True,
        ),
        (OSError(errno.EACCES, "Permission denied", "/data/x"), False),
        (AsyncRLHFError("something else"), False),
    ],
)
def test_it_is_found_behind_other_errors(error: BaseException, known: bool) -> None:
    try:
        try:
            raise error
        except BaseException as cause:
            raise AsyncRLHFError("records could not be written") from cause
    except AsyncRLHFError as wrapped:
        assert shortage(wrapped).startswith("The disk ") is known
