"""Which checkpoint a run or a stage goes on from, and the text of its document."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.data.checkpoint_manifest import LinesSeal, check_manifest, write_manifest
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.records.write.checkpoint import FOLDER, _pieces, find_checkpoints, newest_whole
from asyncrlhf.records.write.record_marker import RecordMarker
from asyncrlhf.stages.stage_record import MARKER_FILE, whole


def stage_run(folder: Path, *steps: int) -> Path:
    """A stage's folder with a line a step, and checkpoints as TRL's trainer leaves them."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    for lines, step in enumerate(steps, start=1):
        checkpoint = folder / FOLDER / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "optimizer.pt").write_bytes(b"states" * step)
        seals = {"metrics.jsonl": LinesSeal(folder / "metrics.jsonl").of(lines)}
        (checkpoint / MARKER_FILE).write_text(json.dumps(asdict(RecordMarker(metrics_lines=lines, seals=seals))))
        write_manifest(checkpoint, {})
    return folder


def resumed(folder: Path, resume: str = "auto") -> tuple[Path | None, list[str]]:
    given = folder if resume == "auto" else None
    found = find_checkpoints(resume, given, folder.parent, MARKER_FILE, "sft")
    return newest_whole(found, partial(whole, run_dir=folder))


def test_a_stage_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    folder = stage_run(tmp_path / "run", 5, 10, 15)
    assert resumed(folder) == (folder / FOLDER / "checkpoint-15", [])
    (folder / FOLDER / "checkpoint-15" / "optimizer.pt").write_bytes(b"stated" * 15)
    found, (note,) = resumed(folder)
    assert found == folder / FOLDER / "checkpoint-10"
    assert "checkpoint-15 is damaged: optimizer.pt has changed since it was written" in note
    with pytest.raises(ConfigError, match="checkpoint-15 is damaged"):
        resumed(folder, str(folder / FOLDER / "checkpoint-15"))
    (folder / "metrics.jsonl").write_text('{"step": 5}\n')
    found, notes = resumed(folder)
    assert found == folder / FOLDER / "checkpoint-5" and len(notes) == 2
    assert "has 1 lines but the checkpoint was made after 2" in notes[1]


def test_auto_takes_the_newest_run_that_has_any_and_does_not_go_back_behind_it(tmp_path: Path) -> None:
    stage_run(tmp_path / "2026-01-01", 5)
    newest = stage_run(tmp_path / "2026-01-02", 7)
    (tmp_path / "2026-01-03").mkdir()
    assert find_checkpoints("auto", None, tmp_path, MARKER_FILE, "sft") == [newest / FOLDER / "checkpoint-7"]
    (newest / FOLDER / "checkpoint-7" / "optimizer.pt").unlink()
    with pytest.raises(ConfigError, match=r"no whole checkpoint: the checkpoint .*checkpoint-7 lacks 'optimizer\.pt'"):
        newest_whole(find_checkpoints("auto", None, tmp_path, MARKER_FILE, "sft"), partial(whole, run_dir=newest))
    assert newest_whole([], check_manifest) == (None, [])


def test_a_file_that_goes_missing_while_it_is_written_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lost learner/a while it was written"):
        write_manifest(tmp_path, {"learner/a": {"bytes": 3, "sha256": ""}})


@pytest.mark.parametrize(
    "value",
    [{}, [], 3, {"a": {}}, {"a": [1, {"b": [{"c": {"d": [2.5, None]}}]}], "ä\ud800": "x"}, {"x": {1: {2: {3: 4}}}}],
)
def test_the_document_is_plain_json(value: Any) -> None:
    assert json.loads("".join(_pieces(value))) == json.loads(json.dumps(value))
