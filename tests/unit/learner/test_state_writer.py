"""A checkpoint holds the state at its snapshot, however late it is written, and what is read of it runs nothing."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.state import state_file, state_writer
from asyncrlhf.learner.state.state_file import read_state, split, write_file
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.learner.updates.deepspeed_updater import _StateFiles
from tests.unit.learner.ranks import batches, build, curve

SHARED = torch.arange(6.0).reshape(2, 3)
STATES: dict[str, Any] = {
    "nested": {"a": [1, -2.5, None, True, "ä\ud800"], 3: {"b": (1, (2,))}, "c": {}},
    "no finite numbers": [float("inf"), -0.0, 1e-320, 0.1 + 0.2],
    "kinds": [torch.arange(4, dtype=kind) for kind in (torch.float64, torch.bfloat16, torch.int8, torch.uint8)],
    "shapes": [torch.tensor(1.5), torch.zeros(0, 3), torch.tensor([[True]]), SHARED.T, SHARED[:, 1]],
    "tied": {"one": SHARED, "other": SHARED},
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "PIECE", 7)
    writer = StateWriter(torch.device("cpu"))
    writer.begin(tmp_path)
    writer.write_state(tmp_path / "deep" / "state", STATES[name])
    seals = writer.end()
    content = (tmp_path / "deep/state").read_bytes()
    assert seals == {"deep/state": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    assert same(read_state(tmp_path / "deep/state"), STATES[name])


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    assert len(split(STATES["tied"])[1]) == 1


def test_what_is_no_value_is_refused_or_left_out() -> None:
    state = {"kept": 1, "scaler": object()}
    with pytest.raises(CheckpointError, match="holds a object"):
        split(state)
    assert split({**state, "stage": Enum("Stage", "two", type=int).two}, whole=False)[0] == {
        "dict": [["kept", 1], ["stage", 1]]
    }


def test_the_state_is_that_of_the_snapshot_however_late_it_is_written(tmp_path: Path) -> None:
    learner, given, late = build(), batches(6), threading.Event()
    curve(learner, given[:2])
    learner.make_room()
    learner.writer.end()
    room = dict(learner.writer._buffers)
    assert room and not list(tmp_path.iterdir())
    for folder, steps in ((tmp_path / "first", given[2:4]), (tmp_path / "second", given[4:])):
        late.clear()
        learner.writer._pool.submit(late.wait)
        learner.begin_save(folder)
        straight = curve(learner, steps)
        assert not list(folder.rglob("*.safetensors")) and not learner.writer.idle
        late.set()
        learner.writer.end()
        assert all(learner.writer._buffers[name] is buffer for name, buffer in room.items()), "the room is used"
        resumed = build()
        resumed.load(folder)
        assert curve(resumed, steps) == straight


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any) -> dict[str, Any]:
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(state_writer, "write_file", full)
    writer = StateWriter(torch.device("cpu"))
    writer.begin(tmp_path)
    writer.write_state(tmp_path / "state", {})
    with pytest.raises(CheckpointError, match=r"could not be written: \[Errno 28\] No space left"):
        writer.end()
    monkeypatch.undo()
    writer.begin(tmp_path)
    writer.write_state(tmp_path / "state", {"next": 1})
    assert writer.end().keys() == {"state"} and read_state(tmp_path / "state") == {"next": 1}


def test_a_file_is_safetensors_and_keeps_its_header_apart(tmp_path: Path) -> None:
    write_file(tmp_path / "file", {"a": SHARED.contiguous()}, {"state": "[1]"})
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"state": "[1]"} and torch.equal(file.get_tensor("a"), SHARED)
    assert read_state(tmp_path / "file", tensors=False) == [1]


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_what_deepspeed_reads_is_no_code(tmp_path: Path) -> None:
    """The engine's own reader would make the folder."""
    exploded = tmp_path / "exploded"
    for content in (pickle.dumps(Bomb(exploded)), None):
        file = tmp_path / "mp_rank_00_model_states.pt"
        if content is None:
            torch.save({"module": Bomb(exploded)}, file)
        else:
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match="does not hold a learner's state"):
            _StateFiles(None).load(str(file))
        assert not exploded.exists()
