"""Weights bucket by bucket without staging: what a receiver holds meanwhile, groups that leave one another alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.collective import receiver as collective_receiver
from asyncrlhf.transport.collective.control_line import Line, Message
from asyncrlhf.transport.collective.group import BroadcastGroup, formed
from asyncrlhf.transport.collective.receiver import CollectiveReceiver
from asyncrlhf.transport.collective.sender import CollectiveSender
from asyncrlhf.transport.local import LocalReceiver, LocalSender
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.protocol import LostReceiversError, Ticket, replica_name, worker_name
from asyncrlhf.transport.sender import Wire
from asyncrlhf.transport.weights_config import WeightsConfig

BUCKETS = 6


def model(version: int) -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.full((64, 64), float(version * 10 + i)) for i in range(BUCKETS)}


class Groups:
    """A sender, and receivers in threads, as many groups as asked for."""

    def __init__(
        self, seconds: float = 20.0, wire: Wire | None = None, make: Callable[[int], dict[str, torch.Tensor]] = model
    ) -> None:
        """``make``: the tensors of a version, of which each is a bucket."""
        self.make = make
        manifest = build_manifest(make(0), 1)
        self.sender = CollectiveSender(manifest, timeout_seconds=seconds, wire=wire or Wire(checksum=True))
        self.endpoint = self.sender.listen("127.0.0.1")
        self.receivers: dict[str, CollectiveReceiver] = {}
        self.pool = ThreadPoolExecutor(8)
        self.seconds = seconds

    def connect(self, epoch: int, *names: str) -> None:
        for name in names:
            self.receivers[name] = CollectiveReceiver(timeout_seconds=self.seconds)
        joins = [
            self.pool.submit(self.receivers[name].connect, self.endpoint, rank, len(names) + 1, epoch, name)
            for rank, name in enumerate(names, start=1)
        ]
        self.sender.connect(self.endpoint, names, epoch)
        for join in joins:
            join.result(timeout=60)

    def ticket(self, version: int, epoch: int) -> Ticket:
        self.sender.snapshot(version, self.make(version))
        ticket = self.sender.ticket()
        return Ticket(ticket.version, epoch, ticket.manifest, ticket.refs, ticket.checksums, ticket.sparse)

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        self.pool.shutdown()


@pytest.fixture
def groups() -> Iterator[Groups]:
    gc.freeze()  # a collection looks at what a test makes, and not at all that earlier ones left
    made = Groups()
    yield made
    made.close()
    gc.unfreeze()


def taken(receiver: CollectiveReceiver, ticket: Ticket) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for tensors in receiver.stream(ticket) for name, tensor in tensors.items()}


def check(found: dict[str, torch.Tensor], version: int) -> None:
    assert found.keys() == model(version).keys()
    for name, tensor in model(version).items():
        assert torch.equal(found[name], tensor), name


def test_a_stream_brings_every_bucket_and_at_most_two_live_at_once(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.connect(1, "g/0", "g/1")
    live: weakref.WeakSet[Any] = weakref.WeakSet()
    most = []
    original = BroadcastGroup.begin

    def begin(self: BroadcastGroup, tensor: torch.Tensor) -> None:
        if tensor.numel() > 1 and not any(tensor is bucket for bucket in groups.sender.buckets.tensors):
            live.add(tensor.untyped_storage())
            released = time.monotonic() + 10  # gloo's thread lets go of a bucket shortly after it is told complete
            while len(live) > 2 and time.monotonic() < released:
                gc.collect()
            most.append(len(live))
        original(self, tensor)

    for version in (1, 2):
        ticket = groups.ticket(version, 1)
        others = groups.pool.submit(taken, groups.receivers["g/1"], ticket)
        sending = groups.pool.submit(groups.sender.transfer, ticket)
        check(taken(groups.receivers["g/0"], ticket), version)
        check(others.result(timeout=60), version)
        sending.result(timeout=60)
    monkeypatch.setattr(BroadcastGroup, "begin", begin)
    groups.connect(2, "alone")
    ticket = groups.ticket(3, 2)
    sending = groups.pool.submit(groups.sender.transfer, ticket)
    found = {}
    for tensors in groups.receivers["alone"].stream(ticket):
        found |= {name: tensor.clone() for name, tensor in tensors.items()}
        del tensors
    check(found, 3)
    sending.result(timeout=60)
    assert len(most) == BUCKETS and max(most) <= 2, most


def test_the_end_of_one_group_leaves_the_other_as_it_is(groups: Groups) -> None:
    groups.connect(1, "a/0", "a/1")
    groups.connect(2, "b/0")
    standing = groups.sender._members[2].group
    ticket = groups.ticket(1, 1)
    for name in ("a/0", "a/1"):
        groups.receivers[name].close()
    with pytest.raises(LostReceiversError, match=r"a/[01] died") as caught:
        groups.sender.transfer(ticket)
    assert {replica_name(name) for name in caught.value.receivers} == {"a"}
    with pytest.raises(WeightSyncError, match=r"No group|The ticket is for"):
        groups.sender.transfer(ticket)
    ticket = groups.ticket(2, 2)
    sending = groups.pool.submit(groups.sender.transfer, ticket)
    check(taken(groups.receivers["b/0"], ticket), 2)
    sending.result(timeout=60)
    assert groups.sender._members[2].group is standing
    groups.connect(3, "a/0", "a/1")
    assert set(groups.sender._members) == {2, 3}


def test_a_receiver_that_gives_up_in_the_middle_is_named(groups: Groups) -> None:
    groups.connect(1, "a/0")
    ticket = groups.ticket(1, 1)
    sending = groups.pool.submit(groups.sender.transfer, ticket)
    stream = groups.receivers["a/0"].stream(ticket)
    next(stream)
    stream.close()
    with pytest.raises(LostReceiversError, match="a/0"):
        sending.result(timeout=60)


def test_a_bucket_that_arrives_wrong_is_named(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.connect(1, "a/0")
    ticket = groups.ticket(1, 1)
    original = collective_receiver.view_of
    monkeypatch.setattr(collective_receiver, "view_of", lambda entry, bucket: original(entry, bucket) * 2)
    sending = groups.pool.submit(groups.sender.transfer, ticket)
    with pytest.raises(WeightSyncError, match=r"Bucket 0 of version 1 arrived at a/0 .*it holds layer0"):
        taken(groups.receivers["a/0"], ticket)
    with pytest.raises(LostReceiversError):
        sending.result(timeout=60)


def test_a_call_that_waits_in_the_old_group_leaves_the_new_one_alone(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old sender is frozen: its receiver waits for a version when the next sender's group forms."""
    groups.connect(1, "g")
    receiver, old = groups.receivers["g"], groups.sender
    waiting = groups.pool.submit(receiver.receive, groups.ticket(1, 1))
    new = CollectiveSender(old.manifest, timeout_seconds=groups.seconds, wire=Wire(checksum=True))
    endpoint, sent = new.listen("127.0.0.1"), Line.send

    def send(self: Line, message: Message) -> None:
        if message.get("epoch") == 2:  # in the new group's hello: the old call ends first, and cleans up
            with pytest.raises(WeightSyncError, match="Version 1"):
                waiting.result(timeout=60)
        sent(self, message)

    monkeypatch.setattr(Line, "send", send)
    joining = groups.pool.submit(receiver.connect, endpoint, 1, 2, 2, "g")
    new.connect(endpoint, ["g"], 2)
    joining.result(timeout=60)
    new.snapshot(2, model(2))
    sending = groups.pool.submit(new.transfer, new.ticket())
    check(dict(receiver.receive(new.ticket())), 2)
    sending.result(timeout=60)
    new.close()


def test_a_late_call_writes_nothing_into_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call's sender is lost; it goes on to copy when the next sender's version is there."""
    sender, receiver, pool = LocalSender(build_manifest(model(0), 64 * 64 * 4)), LocalReceiver(), ThreadPoolExecutor(2)
    begun, let, original = threading.Event(), threading.Event(), LocalReceiver._fetch

    def fetch(self: LocalReceiver, ticket: Ticket, *arguments: Any) -> None:
        if ticket.version == 1:
            begun.set()
            assert let.wait(60)
        original(self, ticket, *arguments)

    monkeypatch.setattr(LocalReceiver, "_fetch", fetch)
    tickets = []
    for version in (1, 2):
        sender.snapshot(version, model(version))
        tickets.append(sender.ticket())
    late = pool.submit(receiver.receive, tickets[0])
    assert begun.wait(60)
    newer = pool.submit(receiver.receive, tickets[1])
    wait([newer], timeout=0.1)
    let.set()
    late.result(timeout=60)
    check(dict(newer.result(timeout=60)), 2)
    pool.shutdown()


def slow(monkeypatch: pytest.MonkeyPatch, ranks: Sequence[int]) -> tuple[threading.Event, threading.Event]:
    """These ranks' groups wait to form: an event when one does, and one that lets them go on."""
    begun, let, original = threading.Event(), threading.Event(), BroadcastGroup.__init__

    def init(self: BroadcastGroup, store: Any, backend: str, rank: int, *arguments: Any) -> None:
        if rank in ranks and not let.is_set():
            begun.set()
            assert let.wait(60)
        original(self, store, backend, rank, *arguments)

    monkeypatch.setattr(BroadcastGroup, "__init__", init)
    return begun, let


def test_a_receiver_that_ends_while_the_group_forms_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(seconds=600.0)
    begun, let = slow(monkeypatch, [0, 1])
    receiver = CollectiveReceiver(timeout_seconds=600.0)
    joining = groups.pool.submit(receiver.connect, groups.endpoint, 1, 2, 1, "g")
    forming = groups.pool.submit(groups.sender.connect, groups.endpoint, ["g"], 1)
    assert begun.wait(60)
    receiver.close()
    with pytest.raises(LostReceiversError, match="epoch 1 could not form: g died or dropped the connection"):
        forming.result(timeout=60)
    with pytest.raises(WeightSyncError, match="g could not join the weight group of epoch 1: the sender refused"):
        joining.result(timeout=60)
    let.set()
    groups.pool.submit(groups.connect, 2, "g").result(timeout=60)
    groups.close()


def test_a_receiver_does_not_wait_for_a_group_that_its_sender_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two receivers one ends; the other joins the next group at once, and the end of its first call, which comes
    late, leaves that group alone."""
    groups = Groups(seconds=600.0)
    begun, let = slow(monkeypatch, [0, 1, 2])
    stays, ends = (CollectiveReceiver(timeout_seconds=600.0) for _ in range(2))
    joins = [
        groups.pool.submit(receiver.connect, groups.endpoint, rank, 3, 1, name)
        for rank, receiver, name in ((1, stays, "stays"), (2, ends, "ends"))
    ]
    forming = groups.pool.submit(groups.sender.connect, groups.endpoint, ["stays", "ends"], 1)
    assert begun.wait(60)
    ends.close()
    with pytest.raises(LostReceiversError, match="ends died") as caught:
        forming.result(timeout=60)
    assert list(caught.value.receivers) == ["ends"]
    for join in joins:
        with pytest.raises(WeightSyncError, match="could not join the weight group of epoch 1"):
            join.result(timeout=60)
    let.set()
    again = groups.pool.submit(stays.connect, groups.endpoint, 1, 2, 2, "stays")
    groups.pool.submit(groups.sender.connect, groups.endpoint, ["stays"], 2).result(timeout=60)
    again.result(timeout=60)
    ticket = groups.ticket(1, 2)
    sending = groups.pool.submit(groups.sender.transfer, ticket)
    check(dict(stays.receive(ticket)), 1)
    sending.result(timeout=60)
    stays.close()
    groups.close()


def test_a_group_over_which_no_byte_passes_is_not_waited_for() -> None:
    """What NCCL does when it connects at the first broadcast alone, and one rank never comes."""

    class Hanging(BroadcastGroup):
        def __init__(self) -> None:
            self.device, self._works, self._group, self._stream = torch.device("cpu"), [], None, None

        def broadcast(self, tensors: list[torch.Tensor]) -> None:
            released.wait(30)

    released = threading.Event()

    with pytest.raises(RuntimeError, match=r"it did not form within 0\.1 s"):
        formed(Hanging, time.sleep, 0.1)
    released.set()


def test_the_time_limit_grows_with_the_bytes() -> None:
    config = WeightsConfig(timeout_seconds=60)
    assert config.seconds_for(0) == 60
    assert config.seconds_for(140 * 10**9) == 60 + 1400
    sender = CollectiveSender(build_manifest(model(0), 1 << 20), timeout_seconds=1, bytes_per_second=1000)
    assert sender._transfer_seconds == pytest.approx(1 + BUCKETS * 64 * 64 * 4 / 1000)


@pytest.mark.in_turn
@pytest.mark.more
def test_a_worker_belongs_to_its_replica() -> None:
    assert replica_name(worker_name("generator-fast-0", 3)) == "generator-fast-0"
    assert replica_name("generator-0") == "generator-0"
