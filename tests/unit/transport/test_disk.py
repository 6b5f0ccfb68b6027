"""Weights on disk: whole or not there, damage named, old versions and a crashed writer's remains removed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.disk import (
    ANSWERS,
    INDEX,
    MANIFEST,
    WRITING,
    DiskReceiver,
    DiskSender,
    bucket_file,
    folder_name,
)
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.protocol import LostReceiversError
from asyncrlhf.transport.receiver import Staging
from asyncrlhf.transport.sender import Wire


def model(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.full((64, 4), float(value + i)) for i in range(4)}


MANIFEST_OF_MODEL = build_manifest(model(), 1024)  # four buckets, one tensor each


def begin_to_write(root: Path, name: str) -> None:
    (root / f"{WRITING}{name}").mkdir()
    save_file({"layer0": model()["layer0"]}, root / f"{WRITING}{name}" / bucket_file(0, 4))


class Pair:
    def __init__(self, root: Path, names: list[str], **wire: Any) -> None:
        self.root = root
        self.sender = DiskSender(MANIFEST_OF_MODEL, root, timeout_seconds=5.0, wire=Wire(**wire))
        endpoint = self.sender.listen()
        self.receivers = {name: DiskReceiver(timeout_seconds=0.3) for name in names}
        for rank, (name, receiver) in enumerate(self.receivers.items(), start=1):
            receiver.connect(endpoint, rank, len(names) + 1, 0, name)
        self.sender.connect(endpoint, names, 0)

    def write(self, version: int, value: float = 0.0) -> Path:
        self.sender.snapshot(version, model(value or version))
        self.ticket = self.sender.ticket()
        self.sender.transfer(self.ticket)
        return self.root / str(self.ticket.refs[0])

    def versions(self) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in self.root.glob("v*"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "weights", ["g0", "g1"])
    yield pair
    pair.sender.close()


def test_a_version_is_files_that_others_read(pair: Pair) -> None:
    folder = pair.write(3)
    index = json.loads((folder / INDEX).read_text())
    loaded = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model(3).items())
    facts = json.loads((folder / MANIFEST).read_text())
    assert facts["version"] == 3 and facts["checksums"] == list(pair.ticket.checksums)
    assert [tensor[:3] for tensor in facts["tensors"]] == [[name, [64, 4], "float32"] for name in model()]


def test_old_versions_go_when_every_receiver_has_the_newer_one(pair: Pair) -> None:
    g0, g1 = pair.receivers.values()
    for version in (1, 2):
        pair.write(version)
        g0.receive(pair.ticket)
    assert pair.versions() == ["v00000001", "v00000002"]  # g1 has read neither
    pair.write(3)
    assert pair.versions() == ["v00000001", "v00000002", "v00000003"]
    for receiver in (g0, g1):
        receiver.receive(pair.ticket)
    pair.write(4)
    assert pair.versions() == ["v00000003", "v00000004"]


def _broken(*_: object) -> None:
    raise WeightSyncError("the transfer breaks off")


def test_a_receiver_that_stops_in_the_middle_keeps_its_version_on_disk(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    g0, g1 = pair.receivers.values()
    pair.write(1)
    g0.receive(pair.ticket)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "verify", _broken)
        with pytest.raises(WeightSyncError, match="breaks off"):
            g1.receive(pair.ticket)
    pair.write(2)
    assert "v00000001" in pair.versions()
    assert len(g1.receive(pair.ticket)) == len(model())


def test_damage_names_the_bucket(pair: Pair) -> None:
    folder = pair.write(1)
    path = folder / bucket_file(2, 4)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"Bucket 2 of version 1 arrived at g0 .*layer2"):
        pair.receivers["g0"].receive(pair.ticket)
    path.write_bytes(data[:40])
    with pytest.raises(WeightSyncError, match=r"model-00003-of-00004.safetensors cannot be read"):
        pair.receivers["g1"].receive(pair.ticket)


def test_a_receiver_names_what_is_missing_after_its_time_out(pair: Pair) -> None:
    pair.sender.snapshot(1, model(1))
    ticket = pair.sender.ticket()
    with pytest.raises(WeightSyncError, match=r"Version 1 is not complete .* after 0\.3 s: the folder v00000001-"):
        pair.receivers["g0"].receive(ticket)
    begin_to_write(pair.root, str(ticket.refs[0]))
    with pytest.raises(WeightSyncError, match=r"1 of 4 buckets are written and manifest\.json is missing"):
        pair.receivers["g0"].receive(ticket)


def test_a_receiver_waits_for_the_whole_version(pair: Pair) -> None:
    patient = DiskReceiver(timeout_seconds=30.0)
    patient.connect(str(pair.root), 1, 2, 0, "g0")
    pair.sender.snapshot(1, model(1))
    ticket = pair.sender.ticket()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(patient.receive, ticket)
        pair.sender.transfer(ticket)
        assert torch.equal(receiving.result(timeout=90)["layer3"], model(1)["layer3"])


def test_who_does_not_share_the_folder_is_named(tmp_path: Path) -> None:
    sender = DiskSender(MANIFEST_OF_MODEL, tmp_path / "weights", timeout_seconds=0.2)
    sender.listen()
    elsewhere = DiskReceiver(timeout_seconds=0.2)
    with pytest.raises(WeightSyncError, match=r"g1 cannot write to .*the same folder on all machines"):
        elsewhere.connect(str(tmp_path / "not mounted"), 2, 3, 4, "g1")
    here = DiskReceiver(timeout_seconds=0.2)
    here.connect(str(tmp_path / "weights"), 1, 3, 4, "g/0")  # any name is good for a file
    with pytest.raises(LostReceiversError, match=r"epoch 4 could not form: g1 left no answer in .*within 0\.2 s"):
        sender.connect("", ["g/0", "g1"], 4)


def write_and_die(root: Path) -> None:
    sender = DiskSender(MANIFEST_OF_MODEL, root, timeout_seconds=5.0)
    sender.listen()
    begin_to_write(root, folder_name(9))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.in_turn
@pytest.mark.more
def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(root,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL and len(list(root.glob(".writing-v*"))) == 1
    for name in ("v00000008-0a1b2c3d", "my-notes", "v2"):
        (root / name).mkdir()
    (root / ANSWERS / "g0.json").write_text(json.dumps({"epoch": 0}))
    pair = Pair(root, ["g1"])
    assert sorted(path.name for path in root.iterdir()) == ["in-use.lock", "my-notes", "receivers", "v2"]
    assert [path.name for path in (root / ANSWERS).iterdir()] == ["g1.json"]
    pair.sender.close()


def test_two_runs_do_not_share_a_folder(pair: Pair) -> None:
    second = DiskSender(MANIFEST_OF_MODEL, pair.root, timeout_seconds=5.0)
    with pytest.raises(WeightSyncError, match="is in use by another run"):
        second.listen()
    pair.sender.close()
    second.listen()
    second.close()


def test_a_delta_does_not_write_what_is_there(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "weights", ["g0"], delta="sparse")
    first = pair.write(1, 5.0)
    changed = model(5.0)
    changed["layer2"] += 1
    pair.sender.snapshot(2, changed)
    ticket = pair.sender.ticket()
    assert pair.sender.transfer(ticket).bytes == 1024
    second = pair.root / str(ticket.refs[0])
    same = [os.path.samefile(first / bucket_file(i, 4), second / bucket_file(i, 4)) for i in range(4)]
    assert same == [True, True, False, True]
    assert torch.equal(pair.receivers["g0"].receive(ticket)["layer2"], changed["layer2"])
    pair.sender.close()


def test_a_disk_that_refuses_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrlhf.transport.disk.save_file", full)
    with pytest.raises(WeightSyncError, match=r"Version 6 cannot be written to .*No space left on device"):
        pair.write(6)
    assert list(pair.root.glob(".writing-*")) == []
    monkeypatch.undo()
    assert pair.write(7).is_dir()
