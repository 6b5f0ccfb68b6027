"""One suite for every transport: bytes arrive as they were at the snapshot, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport import manifest
from asyncrlhf.transport.build_transport import build_receiver, build_sender
from asyncrlhf.transport.protocol import Ticket, TransferStats
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.transport.weights_config import WeightsConfig

Params = dict[str, torch.Tensor]
TRANSPORTS = ["local", "object_store", "collective", "shared_memory", "disk"]


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

    def __init__(self, kind: str, folder: Path, params: Params, **settings: Any) -> None:
        settings = {"bucket_mb": 0.01, "timeout_seconds": 20.0, **settings}
        disk = {"disk_path": str(folder / "weights")} if kind == "disk" else {}
        self.kind, self.config = kind, WeightsConfig(transport=kind, **disk, **settings)
        self.runtime = "local" if kind == "local" else "ray"
        self.sender: WeightSender = build_sender(self.config, self.runtime, params)
        self.endpoint = self.sender.listen("127.0.0.1")
        self.receivers: dict[str, WeightReceiver] = {}
        self.pool = ThreadPoolExecutor(20)

    def connect(self, names: list[str], epoch: int) -> None:
        size = len(names) + 1
        joins: list[Future[Any]] = []
        for rank, name in enumerate(names, start=1):
            receiver = self.receivers.setdefault(name, build_receiver(self.config, self.runtime))
            joins.append(self.pool.submit(receiver.connect, self.endpoint, rank, size, epoch, name))
        self.sender.connect(self.endpoint, names, epoch)
        for join in joins:
            join.result(timeout=90)
        self.names = names

    def take(self, name: str, ticket: Ticket) -> Mapping[str, torch.Tensor]:
        """What an engine would hold afterwards."""
        return self.receivers[name].receive(ticket)

    def begin(self, version: int, params: Params) -> Ticket:
        """The learner's part, up to where its parameters may change again."""
        self.sender.begin_snapshot(version, params)
        self.sender.fence()
        return self.sender.ticket()

    def deliver(self, ticket: Ticket) -> tuple[list[Mapping[str, torch.Tensor]], TransferStats]:
        receiving = [self.pool.submit(self.take, name, ticket) for name in self.names]
        stats = self.sender.transfer(ticket)
        return [future.result(timeout=90) for future in receiving], stats

    def publish(self, version: int, params: Params) -> list[Mapping[str, torch.Tensor]]:
        return self.deliver(self.begin(version, params))[0]

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        self.pool.shutdown()


Make = Callable[..., Link]


@pytest.fixture(params=TRANSPORTS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "object_store":
        request.getfixturevalue("ray_local")
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Link] = []

    def build(**settings: Any) -> Link:
        made.append(Link(kind, tmp_path, model(), **settings))
        made[-1].connect(["g0", "g1"], 0)
        return made[-1]

    yield build
    for link in made:
        link.close()


@pytest.fixture
def link(make: Make) -> Link:
    return make()


def assert_same(found: Mapping[str, torch.Tensor], expected: Params) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("checksum_on", [True, False])
def test_every_kind_of_tensor_arrives_bit_for_bit(make: Make, checksum_on: bool) -> None:
    link, params = make(checksum=checksum_on), model(1.0)
    ticket = link.begin(1, params)
    received, stats = link.deliver(ticket)
    assert (ticket.version, ticket.epoch) == (1, 0)
    for weights in received:
        assert_same(weights, params)
    payload = sum(p.numel() * p.element_size() for p in params.values())
    assert stats.bytes == sum(ticket.manifest.bucket_bytes) >= payload


def test_a_version_is_that_of_its_fence_whatever_either_side_changes_later(link: Link) -> None:
    for version in (1, 2, 3, 3, 7):
        params = model(float(version))
        ticket = link.begin(version, params)
        for tensor in params.values():
            tensor.data.zero_()
        first, second = link.deliver(ticket)[0]
        assert_same(first, model(float(version)))
        first["embedding"].zero_()
        assert_same(second, model(float(version)))


def test_a_late_joiner_gets_the_newest_version_and_is_in_the_next_epoch(link: Link) -> None:
    link.publish(4, model(4.0))
    params = model(5.0)
    link.begin(5, params)
    link.connect(["g0", "g1", "g2"], 1)
    for weights in link.deliver(link.sender.ticket())[0]:
        assert_same(weights, params)
    received = link.publish(6, model(6.0))
    assert len(received) == 3
    for weights in received:
        assert_same(weights, model(6.0))


def test_a_group_can_shrink_to_nobody_and_grow_to_eight(link: Link) -> None:
    link.publish(1, model(1.0))
    link.connect(["g1"], 1)
    (weights,) = link.publish(2, model(2.0))
    assert_same(weights, model(2.0))
    link.connect([], 2)
    assert link.publish(3, model(3.0)) == []
    link.connect([f"r{i}" for i in range(8)], 3)
    received = link.publish(4, model(4.0))
    assert len(received) == 8
    for weights in received:
        assert_same(weights, model(4.0))


def test_ticket_with_another_manifest_is_refused(link: Link) -> None:
    link.publish(1, model(1.0))
    ticket = link.begin(2, model(2.0))
    first = ticket.manifest.tensors[0]
    renamed = dataclasses.replace(first, name="somebody_else")
    manifest = dataclasses.replace(ticket.manifest, tensors=(renamed, *ticket.manifest.tensors[1:]))
    forged = dataclasses.replace(ticket, manifest=manifest)
    receiving = [link.pool.submit(link.take, name, forged) for name in link.names]
    if link.kind == "collective":
        with pytest.raises(WeightSyncError, match=r"Version 2 .*g0 answered .*manifest"):
            link.sender.transfer(ticket)
    else:
        link.sender.transfer(ticket)
    for future in receiving:
        with pytest.raises(WeightSyncError, match="manifest"):
            future.result(timeout=90)


MISFITS: list[tuple[Callable[[Params], Any], str]] = [
    (lambda p: p.pop("scalar"), "do not fit.*'scalar' is missing"),
    (lambda p: p.update(extra=torch.zeros(1)), "'extra' is unknown"),
    (lambda p: p.update(embedding=torch.zeros(40, 300)), r"'embedding' is float32\[40, 300\]"),
]


def test_parameters_that_do_not_fit_leave_nothing_to_publish(link: Link) -> None:
    """As before the first snapshot. They fail at the fence."""
    for call in (link.sender.ticket, link.sender.tensors):
        with pytest.raises(WeightSyncError, match="no snapshot"):
            call()
    link.publish(1, model(1.0))
    assert link.sender.fence() == 0.0
    for change, problem in MISFITS:
        params = model(2.0)
        change(params)
        with pytest.raises(WeightSyncError, match=problem):
            link.begin(2, params)
        with pytest.raises(WeightSyncError, match="no snapshot"):
            link.sender.ticket()
    for weights in link.publish(3, model(3.0)):
        assert_same(weights, model(3.0))


def test_floats_are_rounded_on_the_way_to_the_dtype_asked_for(make: Make) -> None:
    link = make(dtype="bfloat16")
    params = model(1.0 / 3)
    rounded = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in params.items()}
    ticket = link.begin(1, params)
    received, stats = link.deliver(ticket)
    for weights in received:
        assert_same(weights, rounded)
    assert stats.bytes < 0.55 * sum(p.numel() * p.element_size() for p in params.values())


def test_a_byte_that_changes_on_the_way_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's checksum of one bucket is another one: what a flipped byte between the two looks like."""
    link = make(checksum=True)
    honest = manifest.bucket_checksum
    ours = threading.local()

    def forged(entries: Any, tensors: Any) -> int:
        return honest(entries, tensors) ^ (any(e.name == "fp16" for e in entries) and not hasattr(ours, "receives"))

    monkeypatch.setattr(manifest, "bucket_checksum", forged)

    def receive(name: str, ticket: Ticket) -> Any:
        ours.receives = True
        return link.take(name, ticket)

    ticket = link.begin(3, model(1.0))
    receiving = [link.pool.submit(receive, name, ticket) for name in link.names]
    if link.kind == "collective":
        with pytest.raises(WeightSyncError, match=r"Version 3 .*g\d answered .*Bucket \d of version 3"):
            link.sender.transfer(ticket)
    else:
        link.sender.transfer(ticket)
    sentences = [str(future.exception(timeout=90)) for future in receiving]
    named = [s for s in sentences if "checksum" in s]
    assert named and (link.kind == "collective" or len(named) == 2)
    for sentence in named:
        assert "of version 3 arrived at g" in sentence and "fp16" in sentence


def test_collective_ticket_is_small_and_picklable() -> None:
    sender = build_sender(WeightsConfig(transport="collective"), "ray", model())
    sender.begin_snapshot(3, model(3.0))
    packed = pickle.dumps(sender.ticket())
    assert pickle.loads(packed) == sender.ticket()
    assert len(packed) < 4096
    sender.close()
