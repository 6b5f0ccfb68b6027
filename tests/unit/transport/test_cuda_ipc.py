"""The transport over one GPU's memory, with a table in this process in the place of CUDA's handles."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.transport import cuda_ipc
from asyncrlhf.transport.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.sender import Wire
from tests.one_card import Card

IPC = "weights.transport=cuda_ipc"
FLATTEN = ("cluster=flatten", "learner.gpus=1", "generator.gpus=1", IPC)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def read(receiver: CudaIpcReceiver, ticket: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for views in receiver.stream(ticket) for name, tensor in views.items()}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5, 3), float(version)), "b": torch.arange(7.0) + version}


def test_each_version_is_read_where_it_lies(card: Card) -> None:
    sender = CudaIpcSender(build_manifest(weights(0), 32, torch.bfloat16), "cpu", Wire(torch.bfloat16))
    receivers = [CudaIpcReceiver() for _ in range(2)]
    exported = len(card.open)
    for version in range(3):
        sender.snapshot(version, weights(version))
        ticket = sender.ticket()
        sender.transfer(ticket)
        for receiver in receivers:
            found = read(receiver, ticket)
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(version).items())
            assert found["a"].data_ptr() == sender.tensors()["a"].data_ptr(), "something was copied"
    assert len(card.open) == exported == len(sender.manifest.bucket_bytes) == 2, "a handle a bucket, once"
    with pytest.raises(WeightSyncError, match="is for version 2, but the sender holds version 3"):
        sender.snapshot(3, weights(3))
        sender.transfer(ticket)
    with pytest.raises(WeightSyncError, match="Bucket 0 of version 2"):
        read(receivers[0], ticket)  # whose memory holds other weights by now


def test_a_replica_on_another_card_is_refused(card: Card) -> None:
    sender = CudaIpcSender(build_manifest(weights(0), 32), "cpu")
    sender.snapshot(0, weights(0))
    ticket, card.name = sender.ticket(), "GPU-2"
    with pytest.raises(WeightSyncError, match="works on GPU GPU-2, the learner on GPU-1"):
        read(CudaIpcReceiver(), ticket)


def test_a_machine_that_cannot_share_memory_is_told_the_way_out(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = CudaIpcSender(build_manifest(weights(0), 32), "cpu")
    sender.snapshot(0, weights(0))
    card.free()
    with pytest.raises(WeightSyncError, match=r"cannot open .* \(CUDA error: invalid resource handle\).*=collective"):
        read(CudaIpcReceiver(), sender.ticket())

    def refuse(bucket: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: operation not supported\n...")

    monkeypatch.setattr(cuda_ipc, "export_bucket", refuse)
    with pytest.raises(WeightSyncError, match=r"cannot offer .* \(CUDA error: operation not supported\).*=collective"):
        CudaIpcSender(build_manifest(weights(0), 32), "cpu")


def test_another_senders_memory_is_opened_anew_and_the_old_one_let_go(card: Card) -> None:
    receiver = CudaIpcReceiver()
    for version in (1, 1, 2):
        sender = CudaIpcSender(build_manifest(weights(0), 32), "cpu")
        sender.snapshot(version, weights(version))
        found = read(receiver, sender.ticket())
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())
        assert receiver._opened is not None
        assert [bucket.data_ptr() for bucket in receiver._opened[1]] == [t.data_ptr() for t in sender.buckets.tensors]
        card.free()


# torch shares a CPU's memory by a file of the same class as its file of counts, whose place in the handle it has here.
SENDER = """
import os, signal, sys, torch
from asyncrlhf.transport import cuda_ipc
shared = torch.UntypedStorage(80)
name = shared._share_filename_cpu_()[1]
cuda_ipc.reduce_tensor = lambda bucket: (None, (*[None] * cuda_ipc._COUNTS, name, 0))
print(name.decode(), os.path.exists("/dev/shm" + name.decode()), flush=True)
for bucket in range(2):
    cuda_ipc.export_bucket(torch.zeros(1))
print(os.path.exists("/dev/shm" + name.decode()), flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("end", [0, signal.SIGKILL])
def test_torchs_file_of_counts_has_no_name_that_could_stay(end: int) -> None:
    done = subprocess.run([sys.executable, "-c", SENDER, str(int(end))], capture_output=True, text=True, timeout=60)
    name, before, after = done.stdout.split()
    assert name.startswith("/torch_") and (before, after) == ("True", "False")
    assert done.returncode == -end, f"torch could not close the file: {done.stderr}"
    assert not Path(f"/dev/shm{name}").exists()


def test_a_file_of_counts_that_others_have_open_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(f"/dev/shm/torch_{os.getpid()}_test")
    path.write_bytes((3).to_bytes(4, sys.byteorder))
    handle = (*[None] * cuda_ipc._COUNTS, f"/{path.name}".encode())
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda bucket: (None, handle))
    try:
        assert cuda_ipc.export_bucket(torch.zeros(1)) == handle
        assert path.read_bytes() == (3).to_bytes(4, sys.byteorder)
    finally:
        path.unlink()


def test_the_places_in_a_handle_are_those_of_the_installed_torch() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert (names[cuda_ipc._DEVICE], names[cuda_ipc._COUNTS]) == ("storage_device", "ref_counter_handle")


@pytest.mark.parametrize(
    "change", ["cluster=separate", "learner.gpus=0", "generator.gpus=0", "learner.ranks=2", "generator.replicas=2"]
)
def test_what_does_not_share_one_gpu_is_refused(change: str) -> None:
    load_config([*FLATTEN, "batch_size=64"])
    with pytest.raises(ConfigError, match="cuda_ipc hands over memory of one GPU"):
        load_config([*FLATTEN, "batch_size=64", change])


def test_shares_of_one_gpu_are_taken_in_every_mode() -> None:
    for mode in ("async", "sync", "one_step"):
        load_config(["cluster=one_gpu", IPC, f"async={mode}"])
        load_config(["learner.gpus=0.5", "generator.gpus=0.25", "generator.replicas=2", IPC, f"async={mode}"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("learner.gpus=0.6", "generator.gpus=0.5"), "memory of one GPU"),  # more than one card
        (("learner.gpus=1", "generator.gpus=1"), "memory of one GPU"),
        (("learner.gpus=0", "generator.gpus=0.5"), "memory of one GPU"),  # a learner on the CPU
        (("learner.gpus=0.5", "generator.gpus=0.5", "ray.address=head:1"), "memory of one GPU"),  # which card?
        (("cluster=interleave", "learner.gpus=0.5", "generator.gpus=0.5"), "memory of one GPU"),
        (
            ("cluster=flatten", "learner.gpus=1", "generator.gpus=2", "generator.vllm.tensor_parallel_size=2",
             "generator.engine=vllm"),
            "memory of one GPU",
        ),
        (("cluster=one_gpu", "model.lora.r=4"), "hands over whole weights"),
        (("cluster=one_gpu", "weights.transport=cuda_ipc", "weights.delta=sparse"), "has nothing to save"),
        (("cluster=one_gpu", "runtime=local"), "needs runtime=ray"),
    ],
)  # fmt: skip
def test_what_cannot_hand_over_its_memory_is_refused(
    overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=sentence):
        load_config([*overrides, IPC])
