"""Learner ranks with shards publish while they step on: exact weights, one bucket at a time, and an end for each fault.

A receiver that loads bucket by bucket is held back after its first one, so that the rest is sent after the next step.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from asyncrlhf.learner.ranks import Part, Shards
from asyncrlhf.transport.build_transport import build_receiver, build_sender, lay_out
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.transport.shard_snapshot import ShardSnapshot
from asyncrlhf.transport.weights_config import WeightsConfig
from tests.integration import test_mesh
from tests.unit.learner.ranks import batches, build, run_ranks, share

MB = 2**20
SOON = 60.0  # seconds; generous for a busy machine, below the ranks' time limit
HALF = {"mixed_precision": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"sharding": "fsdp2"},
    "stages": {"pipeline_parallel_size": 2},
    "zero3": {"backend": "deepspeed", "zero_stage": 3},
    "zero3 bfloat16": {"backend": "deepspeed", "zero_stage": 3} | HALF,
    "tensor": {"tensor_parallel_size": 2},  # the last: its model is a random one
}


class HeldBack:
    """A receiver in a thread. It loads bucket by bucket, and after its first bucket waits to be released."""

    def __init__(self, sender: WeightSender, config: WeightsConfig) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self._receiver = cast(WeightReceiver, build_receiver(config, "ray"))
        self._pool = ThreadPoolExecutor(2)
        self._sender = sender
        endpoint = sender.listen("127.0.0.1")
        joining = self._pool.submit(self._receiver.connect, endpoint, 1, 2, 1, "g")
        sender.connect(endpoint, ["g"], 1)
        joining.result(timeout=SOON)

    def start(self) -> tuple[Future[Any], Future[dict[str, torch.Tensor]]]:
        """The transfer and what is received, when the first bucket has arrived."""
        ticket = self._sender.ticket()
        received = self._pool.submit(self._receive, ticket)
        sent = self._pool.submit(self._sender.transfer, ticket)
        assert self.begun.wait(SOON)
        return sent, received

    def _receive(self, ticket: Ticket) -> dict[str, torch.Tensor]:
        found = {}
        for views in self._receiver.stream(ticket):
            found.update({name: tensor.clone() for name, tensor in views.items()})
            self.begun.set()
            assert self.released.wait(SOON)
        return found

    def close(self) -> None:
        self.released.set()
        self._receiver.close()
        self._pool.shutdown()


def train(trained: Any, rank: int) -> None:
    size = trained.ranks // trained.config.shares
    trained.train_step(share(batches(1)[0], rank // size, trained.config.shares))


def publishing(rank: int, ranks: int, name: str, checksum: bool) -> dict[str, Any]:
    """Publish, train a whole step while the receiver is held back, then let it have the rest."""
    settings = CASES[name]
    made = test_mesh.build("llama", rank, ranks, **settings) if name == "tensor" else build(rank, ranks, **settings)
    train(made, rank)
    assert made.shards is not None
    bucket_mb = 0.1 if name != "tensor" else 0.01
    config = WeightsConfig(transport="collective", bucket_mb=bucket_mb, dtype="bfloat16", checksum=checksum)
    snapshot = ShardSnapshot(made.shards, lay_out(config, made.shards.layout()), rank=rank, ranks=ranks, seconds=SOON)
    published = {key: tensor.bfloat16() for key, tensor in made.parameters().items()}
    found: dict[str, Any] = {}
    if rank == 0:
        sender = cast(WeightSender, build_sender(config, "ray", snapshot))
        made.updater.before_update = sender.fence  # as the learner's actor does
        receiver = HeldBack(sender, config)
        sender.begin_snapshot(1, snapshot)
        sent, received = receiver.start()
    else:
        snapshot.take()
    train(made, rank)
    after = made.parameters()
    if rank == 0:
        found["sent before the step ended"] = sent.done()
        receiver.released.set()
        weights = received.result(timeout=SOON)
        sent.result(timeout=SOON)
        found["names"] = weights.keys() == published.keys()
        found["others"] = [key for key, tensor in weights.items() if not torch.equal(tensor, published[key])]
        found["buckets"] = len(sender.manifest.bucket_bytes)
        found["moved"] = sum(not torch.equal(published[key], tensor.bfloat16()) for key, tensor in after.items())
        receiver.close()
        sender.close()
    torch.distributed.barrier()  # a rank that closes waits for rank 0's last request a few seconds only
    found["bytes"] = sum(memory.nbytes for memory in snapshot.parts), sum(t.nbytes for t in published.values())
    snapshot.close()
    return found


def patching(rank: int, ranks: int, name: str) -> list[tuple[bool, float]]:
    """Four versions with ``weights.delta=sparse``: whether each arrived whole, and the share of its bytes that was
    sent. The third is taken and not sent."""
    made = build(rank, ranks, **CASES[name], learning_rate=1e-6)
    assert made.shards is not None
    config = WeightsConfig(transport="collective", bucket_mb=0.05, dtype="bfloat16", delta="sparse")
    manifest = lay_out(config, made.shards.layout())
    snapshot = ShardSnapshot(made.shards, manifest, rank=rank, ranks=ranks, seconds=SOON, keeps=True)
    found = []
    if rank == 0:
        sender, receiver = build_sender(config, "ray", snapshot), build_receiver(config, "ray")
        with ThreadPoolExecutor(2) as pool:
            joining = pool.submit(receiver.connect, sender.listen("127.0.0.1"), 1, 2, 1, "g")
            sender.connect("", ["g"], 1)
            joining.result(timeout=SOON)
    for version in range(5):
        if version:
            train(made, rank)
        published = {key: tensor.bfloat16() for key, tensor in made.parameters().items()}
        if rank == 0:
            sender.snapshot(version, snapshot)
            ticket = sender.ticket()
        else:
            snapshot.take()
        if rank == 0 and version != 2:
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(receiver.receive, ticket)
                sent = sender.transfer(ticket).bytes / manifest.total_bytes
                weights = received.result(timeout=SOON)
            same = all(torch.equal(weights[key], tensor) for key, tensor in published.items())
            found.append((same and weights.keys() == published.keys(), sent))
        torch.distributed.barrier()
    if rank == 0:
        receiver.close()
        sender.close()
    snapshot.close()
    return found


def patching_all(rank: int, ranks: int) -> dict[str, list[tuple[bool, float]]]:
    return {name: patching(rank, ranks, name) for name in CASES if name != "tensor"}


@pytest.mark.thorough
def test_ranks_with_shards_send_what_changed() -> None:
    for name, versions in run_ranks(patching_all, 2, 2)[0].items():
        arrived, shares = zip(*versions, strict=True)
        assert all(arrived), name
        # Whole at first, and after the version that the receiver missed.
        assert shares[0] >= 1 and shares[1] < 0.9 and shares[2] > shares[1] and shares[3] < 0.9, (name, shares)


def publishing_all(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    return {name: publishing(rank, ranks, name, checksum=name == "fsdp2") for name in CASES}


@pytest.mark.in_turn
@pytest.mark.more
def test_a_step_ends_while_a_receiver_is_held_back_and_it_gets_the_old_version() -> None:
    ranks = run_ranks(publishing_all, 2, 2)
    for name in CASES:
        found = ranks[0][name]
        assert not found["sent before the step ended"], name
        assert found["names"] and not found["others"], (name, found["others"])
        assert found["buckets"] > 4, "the last buckets are fetched after the step, whatever is on its way"
        assert found["moved"] > 1, f"{name}: the step changes what is being sent"
        held, whole = zip(*(rank[name]["bytes"] for rank in ranks), strict=True)
        assert whole[0] <= sum(held) <= 1.1 * whole[0], f"{name}: each part is copied once"
        if name != "stages":
            assert max(held) < 0.7 * whole[0], f"{name}: a rank copies its own parts only"


class Halves:
    """16 tensors of 8 MB, of which each of two ranks has half of the rows."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own = [torch.full((1024, 1024), float(i + 1)) for i in range(16)]

    def layout(self) -> Mapping[str, torch.Tensor]:
        return {f"t{i}": torch.empty((2048, 1024), device="meta") for i in range(16)}

    def parts(self) -> dict[str, Part]:
        rows = [self._rank * 1024, (self._rank + 1) * 1024]
        return {f"t{i}": Part(own, (2048, 1024), [[rows], [[0, 1024]]]) for i, own in enumerate(self._own)}


def halves(rank: int, ranks: int, seconds: float = SOON) -> tuple[ShardSnapshot, WeightsConfig]:
    config = WeightsConfig(transport="collective", bucket_mb=8, checksum=False, timeout_seconds=seconds)
    shards = cast(Shards, Halves(rank))
    snapshot = ShardSnapshot(shards, lay_out(config, shards.layout()), rank=rank, ranks=ranks, seconds=seconds)
    return snapshot, config


def private_bytes() -> int:
    gc.collect()
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(rank: int, ranks: int) -> int:
    """The most memory of rank 0 beyond that before the transfer, with what the receiver in it holds."""
    ctypes.CDLL(None).mallopt(-3, MB)  # M_MMAP_THRESHOLD: freed buckets return to the system at once
    snapshot, config = halves(rank, ranks)
    most = 0
    if rank == 0:
        sender = cast(WeightSender, build_sender(config, "ray", snapshot))
        receiver = HeldBack(sender, config)
        sender.begin_snapshot(1, snapshot)
        fetch, before = snapshot.fetch, private_bytes()

        def counted(bucket: int, room: torch.Tensor, ago: int = 0) -> None:
            nonlocal most
            fetch(bucket, room, ago)
            most = max(most, private_bytes() - before)

        snapshot.fetch = counted  # type: ignore[method-assign]
        receiver._receive = lambda ticket: drained(receiver, ticket)  # type: ignore[method-assign]
        sent, received = receiver.start()
        sent.result(timeout=SOON)
        received.result(timeout=SOON)
        receiver.close()
        sender.close()
    else:
        snapshot.take()
    torch.distributed.barrier()
    snapshot.close()
    return most


def drained(receiver: HeldBack, ticket: Ticket) -> Any:
    receiver.begun.set()
    for i, views in enumerate(receiver._receiver.stream(ticket)):
        (tensor,) = views.values()
        assert bool((tensor == i + 1.0).all())
        del views, tensor
    return {}


@pytest.mark.thorough
def test_rank_0_needs_one_bucket_beside_its_own_parts() -> None:
    most = run_ranks(measure, 2, 2)[0]
    # A bucket of 8 MB and rank 1's half of it; the receiver in the same process has at most two buckets, and the
    # comparison's mask is 2 MB.
    assert 8 * MB < most <= (8 + 4 + 2 * 8 + 2 + 2) * MB, f"{most / MB:.1f} MB of a model of 128 MB"


def faulty(rank: int, ranks: int, fault: str, report: Path) -> None:
    """Rank 0 writes what the transfer and the receiver report, and the seconds until all was closed."""
    snapshot, config = halves(rank, ranks, seconds=LIMITS.get(fault, SOON))
    processes: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(processes, os.getpid())
    if rank > 0:
        if fault == "copy":
            snapshot._copy = cast(Any, lambda parts: 1 / 0)  # type: ignore[method-assign]
        with suppress(ZeroDivisionError):
            snapshot.take()
        torch.distributed.barrier()
        snapshot.close()
        return
    sender = cast(WeightSender, build_sender(config, "ray", snapshot))
    receiver = HeldBack(sender, config)
    sender.begin_snapshot(1, snapshot)
    if fault == "copy":
        receiver.begun.set()
    sent, received = receiver.start()
    started = time.monotonic()
    if fault in ("dead", "stopped"):
        os.kill(processes[1], signal.SIGKILL if fault == "dead" else signal.SIGSTOP)
    if fault == "closing":
        sender.close()
    if fault != "silent":
        receiver.released.set()
    errors = [sent.exception(timeout=2 * SOON)]
    receiver.released.set()
    errors.append(received.exception(timeout=2 * SOON))
    receiver.close()
    sender.close()
    seconds = time.monotonic() - started
    report.write_text(json.dumps([[(type(error).__name__, str(error)) for error in errors], seconds]))
    if fault == "stopped":
        os.kill(processes[1], signal.SIGCONT)
    if fault != "dead":
        torch.distributed.barrier()
    snapshot.close()


LIMITS = {"stopped": 2.0, "silent": 2.0, "dead": 10.0}  # seconds that the transport waits; else SOON
ENDS = {
    "dead": ("LearnerLostError", "Learner rank 1 di"),  # "died", or "did not send" in time: gloo can miss an end
    "stopped": ("LearnerLostError", "Learner rank 1 did not send its part of the weights within 2 s."),
    "copy": ("LearnerLostError", "Learner rank 1 does not hold the weights that are being sent: its copy failed."),
    "silent": ("LostReceiversError", "g did not take all buckets within 3.3 s"),
    "closing": ("LostReceiversError", "Version 1 did not reach every receiver"),
}


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("fault", ENDS)
def test_a_fault_during_a_publish_ends_it_with_a_sentence(fault: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with suppress(EOFError):  # of a killed rank
        run_ranks(faulty, 2, 2, fault, report)
    ((kind, sentence), (receivers_kind, _)), seconds = json.loads(report.read_text())
    assert kind == ENDS[fault][0] and ENDS[fault][1] in sentence and "\n" not in sentence
    assert receivers_kind == "WeightSyncError"
    assert seconds < SOON
