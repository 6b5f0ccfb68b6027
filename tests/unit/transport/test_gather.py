"""Sharded weights reach receivers bit for bit; a sender fetches bucket by bucket, and holds one of them at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from asyncrlhf.errors import LearnerLostError
from asyncrlhf.transport.audit import differing_tensors, tensor_digests
from asyncrlhf.transport.build_transport import build_receiver, build_sender, lay_out
from asyncrlhf.transport.collective.sender import CollectiveSender
from asyncrlhf.transport.manifest import FlatBuckets, ShardedParams, build_manifest
from asyncrlhf.transport.weights_config import WeightsConfig

SIZES = {"embed": (50, 4), "a.weight": (8, 8), "a.bias": (8,), "b.weight": (30, 8), "c.weight": (31, 8), "counts": (5,)}
BUCKET_BYTES = 1024


@pytest.fixture(autouse=True)
def collections_are_short() -> Iterator[None]:
    """A collection looks at what the test made, and not at all that the process has imported and earlier tests left."""
    gc.freeze()
    yield
    gc.unfreeze()


class Parts(ShardedParams):
    """Weights that count how many buckets exist at once."""

    def __init__(self, config: WeightsConfig) -> None:
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(shape) for name, shape in SIZES.items()}
        self.tensors["counts"] = torch.arange(5)
        super().__init__({name: tensor.to("meta") for name, tensor in self.tensors.items()})
        cast = None if config.dtype == "auto" else getattr(torch, config.dtype)
        self._copy = FlatBuckets(lay_out(config, self))
        self._cast = cast
        self.taken = self.most = 0
        self.fails = False
        self._live: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def take(self) -> None:
        self._copy.copy_from(self.tensors, self._cast)
        self.taken += 1

    def fetch(self, bucket: int, room: torch.Tensor, ago: int = 0) -> None:
        if self.fails:
            raise LearnerLostError("Learner rank 1 did not send its part of the weights")
        self._live.add(room.untyped_storage())
        gc.collect()
        self.most = max(self.most, len(self._live))
        room.copy_(self._copy.tensors[bucket])

    def expected(self) -> dict[str, str]:
        floats = self._cast or torch.float32
        return tensor_digests({n: t.to(floats) if t.is_floating_point() else t for n, t in self.tensors.items()})


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_transfer_fetches_each_bucket_when_the_one_before_has_been_sent(dtype: str, checksum: bool) -> None:
    config = WeightsConfig(transport="collective", bucket_mb=BUCKET_BYTES / 2**20, dtype=dtype, checksum=checksum)
    params, pool = Parts(config), ThreadPoolExecutor(2)
    sender, receiver = build_sender(config, "ray", params), build_receiver(config, "ray")
    endpoint = sender.listen("127.0.0.1")
    joining = pool.submit(receiver.connect, endpoint, 1, 2, 1, "g")
    sender.connect(endpoint, ["g"], 1)
    joining.result(timeout=60)
    for version in (3, 4):
        assert sender.snapshot(version, params) == 0.0
        expected = params.expected()
        ticket = sender.ticket()
        params.tensors["b.weight"] += 1  # the next step does not wait for the transfer
        receiving = pool.submit(receiver.receive, ticket)
        sender.transfer(ticket)
        assert differing_tensors(expected, tensor_digests(receiving.result(timeout=60))) == []
        assert differing_tensors(expected, tensor_digests(sender.tensors())) == []
    assert params.taken == 2 and len(ticket.manifest.bucket_bytes) > (2 if dtype == "auto" else 1)
    assert params.most == 1, f"{params.most} buckets existed at once"
    sender.close()
    receiver.close()
    pool.shutdown()


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_the_other_transports_send_what_was_taken(transport: str, tmp_path: Path) -> None:
    config = WeightsConfig(
        transport=transport,
        bucket_mb=BUCKET_BYTES / 2**20,
        checksum=True,
        disk_path=str(tmp_path) if transport == "disk" else "",
    )
    params = Parts(config)
    sender, receiver = build_sender(config, "ray", params), build_receiver(config, "ray")
    endpoint = sender.listen("127.0.0.1")
    receiver.connect(endpoint, 1, 2, 1, "g")
    sender.connect(endpoint, ["g"], 1)
    sender.snapshot(3, params)
    ticket = sender.ticket()
    expected = params.expected()
    sender.transfer(ticket)
    assert differing_tensors(expected, tensor_digests(receiver.receive(ticket))) == []
    receiver.close()
    sender.close()


def test_a_rank_that_dies_during_a_fetch_is_reported_and_no_ticket_is_given() -> None:
    config = WeightsConfig(transport="collective", bucket_mb=BUCKET_BYTES / 2**20, checksum=True)
    params = Parts(config)
    sender = build_sender(config, "ray", params)
    assert isinstance(sender, CollectiveSender)
    params.fails = True
    sender.begin_snapshot(3, params)
    with pytest.raises(LearnerLostError, match="rank 1"):
        sender.ticket()
    sender.close()


def test_a_moved_set_of_fetched_buckets_holds_no_memory() -> None:
    config = WeightsConfig(bucket_mb=BUCKET_BYTES / 2**20)
    params = Parts(config)
    sender = CollectiveSender(build_manifest(params, BUCKET_BYTES), timeout_seconds=1.0, sharded=params)
    assert not sender.buckets.memory and not sender.buckets.moved(torch.device("cpu")).memory
