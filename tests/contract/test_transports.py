"""One suite for every transport: bytes arrive as they were at the snapshot, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.base import Ticket, TransferStats, WeightReceiver, WeightSender
from asyncrlhf.transport.build import build_receiver, build_sender
from asyncrlhf.transport.config import WeightsConfig
from asyncrlhf.transport.manifest import build_manifest, views_of

Params = dict[str, torch.Tensor]


def model(value: float = 0.0) -> Params:
    """Every kind of tensor: matrices, a scalar, an empty one, half precision, integers, a transposed view."""
    generator = torch.Generator().manual_seed(7)
    return {
        "embedding": torch.randn(300, 40, generator=generator) + value,
        "weight.bf16": (torch.randn(33, 7, generator=generator) + value).to(torch.bfloat16),
        "scalar": torch.tensor(2.5 + value),
        "empty": torch.zeros(0, 5),
        "transposed": torch.randn(6, 9, generator=generator).t() + value,
        "steps": torch.arange(11) + int(value),
        "mask": torch.rand(5, generator=generator) > 0.5,
        "fp16": torch.full((3,), 0.125 + value, dtype=torch.float16),
        "parameter": torch.nn.Parameter(torch.full((17,), value)),
    }


class Link:
    """A sender and its receivers, each receiver with a thread of its own as in a generator."""

    def __init__(self, kind: str, params: Params) -> None:
        self.config = WeightsConfig(transport=kind, bucket_mb=0.01, timeout_seconds=20.0)
        self.runtime = "local" if kind == "local" else "ray"
        self.sender: WeightSender = build_sender(self.config, self.runtime, params)
        self.endpoint = self.sender.listen("" if kind == "local" else "127.0.0.1")
        self.receivers: dict[str, WeightReceiver] = {}
        self.pool = ThreadPoolExecutor(8)

    def connect(self, names: list[str], epoch: int) -> None:
        size = len(names) + 1
        joins: list[Future[Any]] = []
        for rank, name in enumerate(names, start=1):
            receiver = self.receivers.setdefault(name, build_receiver(self.config, self.runtime))
            joins.append(self.pool.submit(receiver.connect, self.endpoint, rank, size, epoch, name))
        self.sender.connect(self.endpoint, names, epoch)
        for join in joins:
            join.result(timeout=30)
        self.names = names

    def deliver(self, ticket: Ticket) -> tuple[list[Mapping[str, torch.Tensor]], TransferStats]:
        receiving = [self.pool.submit(self.receivers[name].receive, ticket) for name in self.names]
        stats = self.sender.transfer(ticket)
        return [future.result(timeout=30) for future in receiving], stats

    def publish(self, version: int, params: Params) -> list[Mapping[str, torch.Tensor]]:
        self.sender.snapshot(version, params)
        return self.deliver(self.sender.ticket())[0]

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        self.pool.shutdown()


@pytest.fixture(params=["local", "object_store", "collective"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    if request.param == "object_store":
        request.getfixturevalue("ray_local")
    link = Link(request.param, model())
    link.connect(["g0", "g1"], 0)
    yield link
    link.close()


def assert_same(found: Mapping[str, torch.Tensor], expected: Params) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def test_every_kind_of_tensor_arrives_bit_for_bit(link: Link) -> None:
    params = model(1.0)
    stall = link.sender.snapshot(1, params)
    ticket = link.sender.ticket()
    received, stats = link.deliver(ticket)
    assert (ticket.version, ticket.epoch) == (1, 0)
    for weights in received:
        assert_same(weights, params)
    assert (
        stats.bytes == sum(ticket.manifest.bucket_bytes) >= sum(p.numel() * p.element_size() for p in params.values())
    )
    assert stats.stall_seconds == stall > 0


def test_version_after_version(link: Link) -> None:
    for version in (1, 2, 3, 3, 7):
        for weights in link.publish(version, model(float(version))):
            assert_same(weights, model(float(version)))


def test_changes_after_the_snapshot_do_not_leak(link: Link) -> None:
    params = model(1.0)
    link.sender.snapshot(1, params)
    ticket = link.sender.ticket()
    with torch.no_grad():
        for tensor in params.values():
            tensor.zero_()
    for weights in link.deliver(ticket)[0]:
        assert_same(weights, model(1.0))


def test_snapshot_in_the_background_ends_at_the_fence(link: Link) -> None:
    params = model(1.0)
    link.sender.begin_snapshot(1, params)
    link.sender.fence()
    with torch.no_grad():
        params["embedding"].zero_()
    for weights in link.deliver(link.sender.ticket())[0]:
        assert_same(weights, model(1.0))
    assert link.sender.fence() == 0.0
    link.sender.begin_snapshot(2, model(2.0))
    assert link.sender.ticket().version == 2  # waits for the copy, not for the fence
    link.sender.begin_snapshot(3, {"embedding": torch.zeros(1)})
    with pytest.raises(WeightSyncError, match="do not fit"):
        link.sender.fence()


def test_what_a_receiver_does_to_its_weights_stays_there(link: Link) -> None:
    first, second = link.publish(1, model(1.0))
    first["embedding"].zero_()
    assert_same(second, model(1.0))
    _, exported = link.sender.export()
    assert_same(views_of(build_manifest(model(), 10485), [torch.from_numpy(b) for b in exported]), model(1.0))


def test_late_joiner_unpacks_the_export_and_joins_the_next_epoch(link: Link) -> None:
    link.publish(4, model(4.0))
    ticket, buckets = link.sender.export()
    link.sender.snapshot(5, model(5.0))
    assert ticket.version == 4
    assert_same(views_of(ticket.manifest, [torch.from_numpy(bucket) for bucket in buckets]), model(4.0))
    link.connect(["g0", "g1", "g2"], 1)
    received = link.publish(6, model(6.0))
    assert len(received) == 3
    for weights in received:
        assert_same(weights, model(6.0))


def test_group_can_shrink_to_nobody(link: Link) -> None:
    link.publish(1, model(1.0))
    link.connect(["g1"], 1)
    (weights,) = link.publish(2, model(2.0))
    assert_same(weights, model(2.0))
    link.connect([], 2)
    assert link.publish(3, model(3.0)) == []


def test_ticket_with_another_manifest_is_refused(link: Link) -> None:
    link.publish(1, model(1.0))
    link.sender.snapshot(2, model(2.0))
    ticket = link.sender.ticket()
    first = ticket.manifest.tensors[0]
    renamed = dataclasses.replace(first, name="somebody_else")
    manifest = dataclasses.replace(ticket.manifest, tensors=(renamed, *ticket.manifest.tensors[1:]))
    forged = dataclasses.replace(ticket, manifest=manifest)
    receiving = [link.pool.submit(link.receivers[name].receive, forged) for name in link.names]
    if link.config.transport == "collective":
        with pytest.raises(WeightSyncError, match=r"Version 2 .*g0 answered .*manifest"):
            link.sender.transfer(ticket)
    for future in receiving:
        with pytest.raises(WeightSyncError, match="manifest"):
            future.result(timeout=30)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda p: p.pop("scalar"), "'scalar' is missing"),
        (lambda p: p.update(extra=torch.zeros(1)), "'extra' is unknown"),
        (lambda p: p.update(embedding=torch.zeros(40, 300)), r"'embedding' is float32\[40, 300\]"),
    ],
)
def test_parameters_that_do_not_fit_leave_nothing_to_publish(link: Link, change: Any, problem: str) -> None:
    link.publish(1, model(1.0))
    params = model(2.0)
    change(params)
    with pytest.raises(WeightSyncError, match=problem):
        link.sender.snapshot(2, params)
    with pytest.raises(WeightSyncError, match="no snapshot"):
        link.sender.ticket()
    for weights in link.publish(3, model(3.0)):
        assert_same(weights, model(3.0))


def test_nothing_is_published_before_the_first_snapshot(link: Link) -> None:
    for call in (link.sender.ticket, link.sender.export):
        with pytest.raises(WeightSyncError, match="no snapshot"):
            call()


def test_collective_ticket_is_small_and_picklable() -> None:
    sender = build_sender(WeightsConfig(transport="collective"), "ray", model())
    sender.snapshot(3, model(3.0))
    packed = pickle.dumps(sender.ticket())
    assert pickle.loads(packed) == sender.ticket()
    assert len(packed) < 4096
    sender.close()
