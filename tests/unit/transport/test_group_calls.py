"""The weights' group: all of its ranks broadcast alike, and on a device no stream touches what another still uses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.learner.ranks import Shards
from asyncrlhf.transport import shard_snapshot
from asyncrlhf.transport.collective.group import BroadcastGroup
from asyncrlhf.transport.manifest import GatheredBuckets, build_manifest
from asyncrlhf.transport.protocol import LostReceiversError, Ticket
from asyncrlhf.transport.sender import Wire
from asyncrlhf.transport.shard_snapshot import ShardSnapshot
from tests.fake_cuda import FakeCuda, Stream
from tests.unit.transport.test_streams import Groups, taken

SIZES = (64, 16, 80, 32, 48, 24)  # so that another order shows in the calls


def uneven(version: int) -> dict[str, torch.Tensor]:
    """Versions differ in every second tensor."""
    return {f"layer{i}": torch.full((size,), float(version * (i % 2) + i)) for i, size in enumerate(SIZES)}


Calls = dict[str, dict[int, list[tuple[int, torch.dtype, int]]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """By group and rank: bytes, type and root of each broadcast, in order."""
    made: Calls = defaultdict(lambda: defaultdict(list))
    original = BroadcastGroup.__init__

    class Noted:
        def __init__(self, inner: Any, own: list[tuple[int, torch.dtype, int]]) -> None:
            self._inner, self._own = inner, own

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
            self._own.extend((tensor.nbytes, tensor.dtype, options.rootRank) for tensor in tensors)
            return self._inner.broadcast(tensors, options)

    def init(self: BroadcastGroup, store: Any, backend: str, rank: int, *arguments: Any) -> None:
        if rank == 0:
            store.set("noted", str(len(made)))
        own = made[store.get("noted").decode()][rank]
        original(self, store, backend, rank, *arguments)
        self._group = Noted(self._group, own)

    monkeypatch.setattr(BroadcastGroup, "__init__", init)
    return made


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups(make=uneven)
    yield made
    made.close()


def differing(calls: Calls) -> list[str]:
    """The ranks that broadcast otherwise than the sender; one that ended early has only called less."""
    return [
        f"group {name}, rank {rank}: {own} and {ranks[0]}"
        for name, ranks in calls.items()
        for rank, own in ranks.items()
        if own != ranks[0][: len(own)]
    ]


def send(groups: Groups, version: int, epoch: int, streaming: tuple[str, ...] = ()) -> None:
    """One version to all receivers of the epoch; some take it bucket by bucket."""
    ticket = groups.ticket(version, epoch)
    names = groups.sender._members[epoch].lines
    asked = [
        groups.pool.submit(*(taken, groups.receivers[n]) if n in streaming else (groups.receivers[n].receive,), ticket)
        for n in names
    ]
    groups.sender.transfer(ticket)
    for answer in asked:
        found = answer.result(timeout=60)
        assert all(torch.equal(found[name], tensor) for name, tensor in uneven(version).items())


def test_staged_streaming_and_late_receivers_broadcast_alike(groups: Groups, calls: Calls) -> None:
    groups.connect(1, "a", "b")
    for version in (1, 2):
        send(groups, version, 1, ("b",))
    groups.connect(2, "a", "b", "late")
    send(groups, 3, 2, ("late",))
    assert not differing(calls) and [len(ranks) for ranks in calls.values()] == [3, 4]
    sizes = [4 * size for size in SIZES]
    for ranks, versions in zip(calls.values(), (2, 1), strict=True):
        for own in ranks.values():
            assert [size for size, *_ in own] == [1, *sizes * versions]
    # What the checks are for: a receiver that takes two buckets in another order.
    own = calls["0"][1]
    own[3], own[4] = own[4], own[3]
    assert differing(calls) == [f"group 0, rank 1: {own} and {calls['0'][0]}"]


def test_what_has_not_changed_is_broadcast_to_nobody(calls: Calls) -> None:
    groups = Groups(wire=Wire(checksum=True, delta="sparse"), make=uneven)
    groups.connect(1, "a", "b")
    for version in (1, 2):
        send(groups, version, 1)
    groups.connect(2, "a", "b", "late")
    send(groups, 3, 2)
    groups.close()
    assert not differing(calls)
    sizes = [4 * size for size in SIZES]
    assert [size for size, *_ in calls["0"][0]] == [1, *sizes, *sizes[1::2]]
    assert [size for size, *_ in calls["1"][3]] == [1, *sizes]


def test_a_death_in_the_midst_leaves_no_call_to_the_next_group(groups: Groups, calls: Calls) -> None:
    groups.connect(1, "dies", "stays")
    ticket = groups.ticket(1, 1)
    sending = groups.pool.submit(groups.sender.transfer, ticket)
    other = groups.pool.submit(groups.receivers["stays"].receive, ticket)
    stream = groups.receivers["dies"].stream(ticket)
    next(stream)
    stream.close()
    with pytest.raises(LostReceiversError, match="dies"):
        sending.result(timeout=60)
    with suppress(WeightSyncError):  # it may have had all
        other.result(timeout=60)
    groups.connect(2, "stays")
    send(groups, 2, 2)
    assert not differing(calls) and len(calls["0"][1]) < len(calls["0"][0])
    assert calls["1"].keys() == {0, 1} and calls["1"][0] == calls["1"][1]
    assert [size for size, *_ in calls["1"][0]] == [1, *(4 * size for size in SIZES)]


def test_a_silent_receiver_is_sent_nothing_and_its_next_group_begins_anew(calls: Calls) -> None:
    groups = Groups(make=uneven)
    groups.connect(1, "silent")
    groups.sender._members[1]._seconds = 0.5  # of this wait alone: forming a group may take longer on a busy machine
    with pytest.raises(LostReceiversError, match="silent"):
        groups.sender.transfer(groups.ticket(1, 1))
    groups.connect(2, "silent")
    send(groups, 2, 2, ("silent",))
    groups.close()
    assert [[len(own) for own in ranks.values()] for ranks in calls.values()] == [[1, 1], [7, 7]]
    assert not differing(calls)


# --- streams of a device ---------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


def publish(cuda: FakeCuda, streams: bool, versions: int = 3) -> list[str]:
    """Versions to a receiver whose engine loads them on its own stream and does not wait for the end of that; the
    learner's kernels write the next version when the transfer is over. The races that this may have."""
    learner, engine = Stream(cuda), Stream(cuda)
    with cuda.on(learner):
        groups = Groups(wire=Wire(checksum=False), make=uneven)
        groups.connect(1, "g")
        receiver = groups.receivers["g"]

        def receive(ticket: Ticket) -> None:
            with cuda.on(engine):
                for place, tensors in enumerate(receiver.stream(ticket) if streams else [receiver.receive(ticket)]):
                    for tensor in tensors.values():
                        cuda.use(tensor, False, f"load {place} of version {ticket.version}")
                    del tensor, tensors

        def transfer(ticket: Ticket) -> None:
            with cuda.on(learner):
                groups.sender.transfer(ticket)

        for version in range(1, versions + 1):
            for bucket in groups.sender.buckets.tensors:
                cuda.use(bucket, True, f"snapshot {version}")
            learner.synchronize()  # by copy_tensors
            ticket = groups.ticket(version, 1)
            received = groups.pool.submit(receive, ticket)
            groups.pool.submit(transfer, ticket).result(timeout=60)
            received.result(timeout=60)
        groups.close()
    assert sum(what.startswith("broadcast") for *_, what in cuda.uses) == 2 * (1 + versions * len(SIZES))
    assert sum(what.startswith("load") for *_, what in cuda.uses) == versions * len(SIZES)
    return cuda.races()


@pytest.mark.parametrize("streams", [False, True], ids=["staged", "streaming"])
def test_no_stream_touches_what_another_uses(cuda: FakeCuda, streams: bool) -> None:
    assert publish(cuda, streams) == []


def nothing(*_: Any) -> None:
    """In the place of a wait."""


def only_forget(self: BroadcastGroup) -> None:
    del self._works[0]


def unsynchronized(self: BroadcastGroup, place: int) -> None:
    with self._own_stream():
        self._works[place].wait()


PLANTED: dict[str, tuple[bool, dict[str, Callable[..., Any]], str]] = {
    "a bucket's memory is given again before it is loaded": (True, {"after_compute": nothing}, "load .* and broadcast"),
    "staging is filled again before it is loaded": (False, {"after_compute": nothing}, "load .* and broadcast"),
    "staging is filled before it is zeroed": (False, {"after_compute": nothing}, "zeros and broadcast 1 of rank 1"),
    "the first byte": (True, {"after_compute": nothing}, "zeros and broadcast 0 of rank 1"),
    "a bucket is loaded before it is there": (
        True,
        {"completed": lambda self, place: True, "take_first": only_forget},
        "broadcast .* and load",
    ),
    "a snapshot is overwritten before it is sent": (
        True,
        {"wait_one": unsynchronized, "completed": lambda self, place: self._works[place].is_completed()},
        "broadcast .* of rank 0 and snapshot",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_missing_wait_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    streams, changes, words = PLANTED[fault]
    for name, change in changes.items():
        monkeypatch.setattr(BroadcastGroup, name, change)
    assert any(re.search(words, race) for race in publish(cuda, streams))


def fetched(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Buckets of a sharded learner, which a stream of their own fills while the learner's kernels run."""
    original = shard_snapshot._place

    def place(pieces: Any, part: torch.Tensor, bucket: torch.Tensor) -> None:
        cuda.use(bucket, True, "part")
        original(pieces, part, bucket)

    monkeypatch.setattr(shard_snapshot, "_place", place)
    shards = Shards(nn.Linear(8, 8))
    manifest = build_manifest(shards.layout(), 1)
    snapshot = ShardSnapshot(shards, manifest, seconds=5.0)
    snapshot._stream, sends = Stream(cuda), Stream(cuda)
    snapshot.take()
    buckets = GatheredBuckets(snapshot, manifest)
    for bucket in (0, 1):
        room = buckets.fetch(bucket)
        cuda.use(room, False, "broadcast", sends)
        sends.synchronize()
        del room
    assert len(cuda.uses) >= 6
    return cuda.races()


def test_a_fetched_bucket_is_zeroed_before_its_parts_come(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(cuda, monkeypatch) == []


def test_a_bucket_whose_zeros_nobody_waits_for_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_stream", nothing)
    assert any("zeros and part" in race for race in fetched(cuda, monkeypatch))
