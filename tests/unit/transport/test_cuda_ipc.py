"""The transport over one GPU's memory, with a table in this process in the place of CUDA's handles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.transport import cuda_ipc
from asyncrlhf.transport.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.sender import Wire

FLATTEN = ("cluster=flatten", "learner.gpus=1", "generator.gpus=1", "weights.transport=cuda_ipc")


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    table: dict[int, torch.Tensor] = {}
    numbers = itertools.count()

    def export(bucket: torch.Tensor) -> tuple[int]:
        table[number := next(numbers)] = bucket
        return (number,)

    monkeypatch.setattr(cuda_ipc, "export_bucket", export)
    monkeypatch.setattr(cuda_ipc, "open_bucket", lambda handle, device: table[handle[0]])
    monkeypatch.setattr(cuda_ipc, "card", lambda device: "GPU-1")
    return table


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5, 3), float(version)), "b": torch.arange(7.0) + version}


def test_each_version_is_read_where_it_lies(handles: dict[int, torch.Tensor]) -> None:
    sender = CudaIpcSender(build_manifest(weights(0), 32, torch.bfloat16), "cpu", Wire(torch.bfloat16))
    receivers = [CudaIpcReceiver() for _ in range(2)]
    exported = len(handles)
    for version in range(3):
        sender.snapshot(version, weights(version))
        ticket = sender.ticket()
        sender.transfer(ticket)
        for receiver in receivers:
            found = receiver.receive(ticket)
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(version).items())
            assert found["a"].data_ptr() == sender.tensors()["a"].data_ptr(), "something was copied"
    assert len(handles) == exported == len(sender.manifest.bucket_bytes) == 2, "a handle a bucket, once"
    with pytest.raises(WeightSyncError, match="is for version 2, but the sender holds version 3"):
        sender.snapshot(3, weights(3))
        sender.transfer(ticket)
    with pytest.raises(WeightSyncError, match="Bucket 0 of version 2"):
        receivers[0].receive(ticket)  # whose memory holds other weights by now


def test_a_replica_on_another_card_is_refused(handles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = CudaIpcSender(build_manifest(weights(0), 32), "cpu")
    sender.snapshot(0, weights(0))
    monkeypatch.setattr(cuda_ipc, "card", lambda device: "GPU-2")
    with pytest.raises(WeightSyncError, match="works on GPU GPU-2, the learner on GPU-1"):
        CudaIpcReceiver().receive(sender.ticket())


@pytest.mark.parametrize(
    "change", ["cluster=separate", "learner.gpus=0", "generator.gpus=0", "learner.ranks=2", "generator.replicas=2"]
)
def test_what_does_not_share_one_gpu_is_refused(change: str) -> None:
    load_config([*FLATTEN, "batch_size=64"])
    with pytest.raises(ConfigError, match="cuda_ipc hands over memory of one GPU"):
        load_config([*FLATTEN, "batch_size=64", change])
