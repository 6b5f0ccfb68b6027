"""The collective transport between processes over gloo: deaths and hangs are named in time, survivors go on."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.audit import tensor_digests
from asyncrlhf.transport.collective.control_line import own_host
from asyncrlhf.transport.collective.sender import CollectiveSender
from asyncrlhf.transport.manifest import FlatBuckets, ShardedParams, build_manifest
from asyncrlhf.transport.protocol import LostReceiversError
from asyncrlhf.transport.sender import Wire
from tests.integration.transport_process import serve
from tests.processes import forked

LONG = 180.0  # the transport's time-out where a death must be noticed without it
SOON = 60.0  # generous for a busy machine, far below LONG


def model(version: int) -> dict[str, torch.Tensor]:
    """8 MB in 8 buckets: enough that no socket buffer swallows the whole of it."""
    return {f"layer{i}": torch.full((512, 512), float(version * 10 + i)) for i in range(8)}


class Fetched(ShardedParams):
    """The model as sharded learners give it: a copy, of which the sender fetches one bucket after the other."""

    def __init__(self) -> None:
        super().__init__({name: tensor.to("meta") for name, tensor in model(0).items()})
        self.version = 0
        self._copy = FlatBuckets(build_manifest(model(0), 1 << 20))

    def take(self) -> None:
        self._copy.copy_from(model(self.version))

    def fetch(self, bucket: int, room: torch.Tensor, ago: int = 0) -> None:
        room.copy_(self._copy.tensors[bucket])


class Cluster:
    """A sender here and receivers in processes; ``timeout_seconds`` is the transport's. ``fetched``: from shards."""

    def __init__(self, names: list[str], timeout_seconds: float, fetched: bool = False, **wire: Any) -> None:
        self.fetched = Fetched() if fetched else None
        self.sender = CollectiveSender(
            build_manifest(model(0), 1 << 20), timeout_seconds=timeout_seconds, sharded=self.fetched, wire=Wire(**wire)
        )
        self.endpoint = self.sender.listen()
        context = forked()
        self.pipes, self.processes = {}, {}
        for name in names:
            self.pipes[name], theirs = context.Pipe()
            self.processes[name] = context.Process(target=serve, args=(theirs, timeout_seconds), daemon=True)
            self.processes[name].start()
            theirs.close()
        for name in names:
            self.answer(name)

    def order(self, name: str, order: str, arguments: Any) -> None:
        self.pipes[name].send((order, arguments))

    def answer(self, name: str) -> tuple[Any, float]:
        assert self.pipes[name].poll(LONG), f"{name} does not answer"
        answer: tuple[Any, float] = self.pipes[name].recv()
        return answer

    def connect(self, names: list[str], epoch: int) -> None:
        for rank, name in enumerate(names, start=1):
            self.order(name, "connect", (self.endpoint, rank, len(names) + 1, epoch, name))
        self.sender.connect(self.endpoint, names, epoch)
        assert [self.answer(name)[0] for name in names] == [None] * len(names)

    def start(self, version: int, names: list[str]) -> Any:
        if self.fetched is not None:
            self.fetched.version = version
        self.sender.begin_snapshot(version, model(version) if self.fetched is None else self.fetched)
        self.sender.fence()
        ticket = self.sender.ticket()
        for name in names:
            self.order(name, "receive", ticket)
        return ticket

    def close(self) -> None:
        self.sender.close()
        for name, process in self.processes.items():
            self.pipes[name].close()
            if process.pid is not None and process.is_alive():
                process.kill()
            process.join(timeout=10)


@pytest.fixture
def make_cluster() -> Iterator[Any]:
    made: list[Cluster] = []

    def make(names: list[str], timeout_seconds: float = LONG, fetched: bool = False, **wire: Any) -> Cluster:
        made.append(Cluster(names, timeout_seconds, fetched, **wire))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def check_delivery(cluster: Cluster, version: int, names: list[str]) -> None:
    cluster.sender.transfer(cluster.start(version, names))
    expected = tensor_digests(model(version))
    assert [cluster.answer(name)[0] for name in names] == [expected] * len(names)


def test_a_death_between_transfers_is_named_and_the_survivor_goes_on(make_cluster: Any) -> None:
    cluster = make_cluster(["g0", "g1"])
    cluster.connect(["g0", "g1"], 0)
    check_delivery(cluster, 1, ["g0", "g1"])
    cluster.processes["g1"].kill()
    cluster.processes["g1"].join()
    ticket = cluster.start(2, ["g0"])
    started = time.monotonic()
    with pytest.raises(LostReceiversError, match=r"Version 2 .*g1 died") as caught:
        cluster.sender.transfer(ticket)
    assert time.monotonic() - started < SOON
    assert list(caught.value.receivers) == ["g1"]
    sentence, seconds = cluster.answer("g0")
    assert "Version 2 was lost" in sentence
    assert seconds < SOON
    cluster.connect(["g0"], 1)
    check_delivery(cluster, 2, ["g0"])


@pytest.mark.parametrize("fetched", [False, True])
def test_one_of_eight_dies_in_the_middle_and_the_others_go_on(make_cluster: Any, fetched: bool) -> None:
    # Gloo relays along a tree, so that one receiver's death starves others.
    names = [f"g{i}" for i in range(8)]
    cluster = make_cluster(names, fetched=fetched)
    cluster.connect(names, 0)
    cluster.order("g0", "fail", "die")
    cluster.answer("g0")
    ticket = cluster.start(1, names)
    started = time.monotonic()
    with pytest.raises(LostReceiversError) as caught:
        cluster.sender.transfer(ticket)
    assert time.monotonic() - started < SOON
    assert "died" in caught.value.receivers["g0"]
    for name in names[1:]:
        answer, seconds = cluster.answer(name)
        assert seconds < SOON
        assert isinstance(answer, str) or answer == tensor_digests(model(1))  # whole or refused, never half
    cluster.connect(names[1:], 1)
    ticket = cluster.sender.ticket()
    for name in names[1:]:
        cluster.order(name, "receive", ticket)
    cluster.sender.transfer(ticket)
    assert [cluster.answer(name)[0] for name in names[1:]] == [tensor_digests(model(1))] * 7


@pytest.mark.parametrize(("fetched", "delta"), [(False, "none"), (True, "none"), (False, "sparse")])
def test_a_chain_brings_every_version_to_all(make_cluster: Any, fetched: bool, delta: str) -> None:
    names = [f"g{i}" for i in range(4)]
    cluster = make_cluster(names, fetched=fetched, relay=True, delta=delta)
    for epoch, members in enumerate((names, names[:1], names[1:])):
        cluster.connect(members, epoch)
        for version in (3 * epoch, 3 * epoch + 1):
            check_delivery(cluster, version, members)


# The victim's place in the chain, and after how many of eight pieces it dies.
DEATHS = [(place, pieces) for place in range(5) for pieces in range(10)]
TRIED = [(0, 0), (2, 5), (4, 7)]


def tier(place: int, pieces: int) -> Any:
    if (place, pieces) in TRIED:
        return ()
    return pytest.mark.more if pieces in (place, place + 5) else pytest.mark.thorough


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("place", "pieces"),
    [pytest.param(*death, marks=tier(*death)) for death in DEATHS],
)
def test_a_forwarder_that_dies_is_named_alone_and_the_others_get_the_version(
    make_cluster: Any, place: int, pieces: int
) -> None:
    names = [f"g{i}" for i in range(5)]
    cluster = make_cluster(names, relay=True)
    cluster.connect(names, 0)
    cluster.order(names[place], "fail in the chain", (pieces, int(signal.SIGKILL)))
    cluster.answer(names[place])
    ticket, living = cluster.start(1, names), [name for name in names if name != names[place]]
    started = time.monotonic()
    if pieces < 8:
        with pytest.raises(LostReceiversError, match=f"{names[place]} died") as caught:
            cluster.sender.transfer(ticket)
        assert list(caught.value.receivers) == [names[place]], "others were starved, and are innocent"
    else:  # it gets all, and dies with the next version
        cluster.sender.transfer(ticket)
        assert [cluster.answer(name)[0] for name in names] == [tensor_digests(model(1))] * 5
        ticket = cluster.start(2, names)
        with pytest.raises(LostReceiversError) as caught:
            cluster.sender.transfer(ticket)
        assert list(caught.value.receivers) == [names[place]]
    assert time.monotonic() - started < SOON
    version = ticket.version
    for name in living:
        answer, seconds = cluster.answer(name)
        assert seconds < SOON and (isinstance(answer, str) or answer == tensor_digests(model(version)))
    cluster.connect(living, 1)
    ticket = cluster.sender.ticket()
    for name in living:
        cluster.order(name, "receive", ticket)
    cluster.sender.transfer(ticket)
    assert [cluster.answer(name)[0] for name in living] == [tensor_digests(model(version))] * 4


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize(("fetched", "victim"), [(False, "g1"), (True, "g1"), (True, "g0")])
def test_a_forwarder_that_hangs_is_named_after_the_time_out(make_cluster: Any, fetched: bool, victim: str) -> None:
    names = ["g0", "g1", "g2"]
    cluster = make_cluster(names, timeout_seconds=4.0, relay=True, fetched=fetched)
    cluster.connect(names, 0)
    cluster.order(victim, "fail in the chain", (4, int(signal.SIGSTOP)))
    cluster.answer(victim)
    ticket = cluster.start(1, names)
    started = time.monotonic()
    with pytest.raises(LostReceiversError, match=rf"{victim} (gave no answer|did not take all buckets) within 4"):
        cluster.sender.transfer(ticket)
    assert time.monotonic() - started < 7, "it waited for gloo's own time-out"
    living = [name for name in names if name != victim]
    for name in living:
        assert cluster.answer(name)[1] < 8, f"{name} waited for gloo's own time-out: its neighbour hangs on"
    os.kill(cluster.processes[victim].pid, signal.SIGKILL)
    cluster.connect(living, 1)
    check_delivery(cluster, 2, living)


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("fetched", [False, True])
def test_a_hang_in_the_middle_ends_in_the_time_out(make_cluster: Any, fetched: bool) -> None:
    cluster = make_cluster(["g0", "g1"], timeout_seconds=4.0, fetched=fetched)
    cluster.connect(["g0", "g1"], 0)
    cluster.order("g1", "fail", "stop")
    cluster.answer("g1")
    ticket = cluster.start(1, ["g0", "g1"])
    sentence = "g1 did not take all buckets within 4.0 s" if fetched else "g1 gave no answer within 4 s"
    with pytest.raises(LostReceiversError, match=sentence) as caught:
        cluster.sender.transfer(ticket)
    if fetched:  # one bucket after the other, so that all others wait with the one that hangs
        assert list(caught.value.receivers) == ["g1"]
    cluster.answer("g0")
    os.kill(cluster.processes["g1"].pid, signal.SIGKILL)
    cluster.connect(["g0"], 1)
    check_delivery(cluster, 1, ["g0"])


def test_who_joins_during_a_transfer_is_in_the_next_group(make_cluster: Any) -> None:
    cluster = make_cluster(["g0", "g1"])
    cluster.connect(["g0"], 0)
    ticket = cluster.start(1, [])
    with ThreadPoolExecutor(1) as pool:
        transfer = pool.submit(cluster.sender.transfer, ticket)
        cluster.order("g1", "connect", (cluster.endpoint, 2, 3, 1, "g1"))  # its call waits: the sender is busy
        cluster.order("g0", "receive", ticket)
        transfer.result(timeout=LONG)
    assert cluster.answer("g0")[0] == tensor_digests(model(1))
    cluster.order("g0", "connect", (cluster.endpoint, 1, 3, 1, "g0"))
    cluster.sender.connect(cluster.endpoint, ["g0", "g1"], 1)
    assert [cluster.answer(name)[0] for name in ("g0", "g1")] == [None, None]
    check_delivery(cluster, 2, ["g0", "g1"])


@pytest.mark.in_turn
@pytest.mark.more
def test_receivers_that_never_come_are_named(make_cluster: Any) -> None:
    cluster = make_cluster(["g0", "g1"], timeout_seconds=4.0)
    cluster.connect(["g0", "g1"], 0)
    ticket = cluster.start(1, ["g0"])
    with pytest.raises(LostReceiversError, match="g1 gave no answer") as caught:
        cluster.sender.transfer(ticket)
    assert list(caught.value.receivers) == ["g1"]
    cluster.answer("g0")
    cluster.order("g0", "connect", (cluster.endpoint, 1, 3, 1, "g0"))
    with pytest.raises(LostReceiversError, match="epoch 1 could not form: g1 did not join within 4 s"):
        cluster.sender.connect(cluster.endpoint, ["g0", "g1"], 1)
    assert "could not join the weight group of epoch 1" in cluster.answer("g0")[0]


def test_the_learner_runs_while_a_transfer_waits(make_cluster: Any) -> None:
    """The transfer below can only end when this thread goes on: a held GIL would be a deadlock."""
    cluster = make_cluster(["g0"])
    cluster.connect(["g0"], 0)
    cluster.sender.snapshot(1, model(1))
    ticket = cluster.sender.ticket()
    with ThreadPoolExecutor(2) as pool:
        transfer = pool.submit(cluster.sender.transfer, ticket)
        second = pool.submit(cluster.sender.snapshot, 2, model(2))
        torch.randn(64, 64) @ torch.randn(64, 64)
        assert not transfer.done()
        assert not second.done()
        cluster.order("g0", "receive", ticket)
        transfer.result(timeout=LONG)
        second.result(timeout=LONG)
    assert cluster.answer("g0")[0] == tensor_digests(model(1))  # the snapshot that came meanwhile waited


def test_strangers_at_every_port_do_not_disturb_a_publish(make_cluster: Any) -> None:
    """Random bytes, broken hellos and half-open connections before a group forms and while weights travel."""
    cluster = make_cluster(["g0", "g1"])
    stop, met = threading.Event(), [0]

    def bother() -> None:
        random = np.random.default_rng(0)
        kept: list[socket.socket] = []
        while not stop.is_set():
            for port in ports(psutil.Process()):
                with suppress(OSError):
                    kept.append(socket.create_connection((own_host(), port), timeout=1.0))
                    kept[-1].sendall([random.bytes(300), b'{"token": "?", "name": "g0"}\n', b""][len(kept) % 3])
                    met[0] += 1
            for old in kept[:-30]:
                old.close()
            kept = kept[-30:]

    thread = threading.Thread(target=bother)
    thread.start()
    try:
        for epoch in itertools.count():
            cluster.connect(["g0", "g1"], epoch)
            check_delivery(cluster, epoch, ["g0", "g1"])
            if epoch >= 2 and met[0] > 10:  # on a busy machine a publish is over before a stranger has found a port
                break
            assert epoch < 1000, "no stranger finds a port"
    finally:
        stop.set()
        thread.join()


def ports(process: psutil.Process) -> list[int]:
    """TCP ports that the process listens on: the control line's, and those of torch's store and gloo."""
    held = (c for c in psutil.net_connections("tcp") if c.pid == process.pid)  # a process's own: psutil 6
    return sorted({c.laddr.port for c in held if c.status == psutil.CONN_LISTEN})


def test_close_ends_a_transfer_that_waits(make_cluster: Any) -> None:
    cluster = make_cluster(["g0"])
    cluster.connect(["g0"], 0)
    cluster.sender.snapshot(1, model(1))
    ticket = cluster.sender.ticket()
    failed = threading.Event()

    def send() -> None:
        with pytest.raises(WeightSyncError):  # also where it began after the close
            cluster.sender.transfer(ticket)
        failed.set()

    thread = threading.Thread(target=send)
    thread.start()
    cluster.sender.close()
    assert failed.wait(SOON)
    thread.join()


def test_the_default_process_group_is_left_alone(make_cluster: Any, tmp_path: Path) -> None:
    others = dist.is_initialized()  # that of a learner of a test before
    cluster = make_cluster(["g0"])
    cluster.connect(["g0"], 0)
    assert dist.is_initialized() == others
    if not others:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check_delivery(cluster, 1, ["g0"])
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
        assert dist.get_world_size() == 1
    finally:
        if not others:
            dist.destroy_process_group()
