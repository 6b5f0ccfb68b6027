"""The learner's ranks call torch.distributed in one order, so that NCCL could carry it out; recorded over gloo."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrlhf.learner.ranks import Shards, barrier
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.transport.manifest import build_manifest
from asyncrlhf.transport.shard_snapshot import ShardSnapshot
from tests.collectives import Call, Log, Recorder, changed, faults, recorded
from tests.integration import test_mesh
from tests.integration.test_ddp import batches
from tests.unit.learner.ranks import run_ranks
from tests.unit.learner.test_presets import preset
from tests.unit.learner.worlds import llama, random_batch, share

pytestmark = pytest.mark.in_turn  # all share the recorded steps of two ranks
PPO = AlgorithmConfig(advantage="gae", whiten=True, kl="loss", beta=0.1)  # with a critic and a reference
ANSWER = ShardSnapshot._answer
Cases = dict[str, tuple[AlgorithmConfig, dict[str, Any]]]
TWO: Cases = {
    "ddp": (PPO, {}),
    "fsdp2": (AlgorithmConfig(), {"sharding": "fsdp2"}),
    "stages": (AlgorithmConfig(kl="loss", beta=0.1), {"pipeline_parallel_size": 2}),
    "ring": (AlgorithmConfig(), {"context_parallel_size": 2}),
}
MORE: Cases = {
    "targets of all ranks": (replace(preset("m2po"), lr="sqrt_ess"), {}),
    "fsdp2, critic": (PPO, {"sharding": "fsdp2"}),
    "tensor": (AlgorithmConfig(), {"tensor_parallel_size": 2}),
    "ring, critic": (PPO, {"context_parallel_size": 2}),
}
FOUR: Cases = {
    "fsdp2, copies": (PPO, {"sharding": "fsdp2", "dp_replicate_size": 2}),
    "fsdp2, reduced once": (PPO, {"sharding": "fsdp2", "gradient_reduction": "update"}),
    "fsdp2, tensor": (PPO, {"sharding": "fsdp2", "tensor_parallel_size": 2}),
    "four stages": (AlgorithmConfig(kl="loss", beta=0.1), {"pipeline_parallel_size": 4}),
    "stages, shares": (AlgorithmConfig(), {"pipeline_parallel_size": 2}),
    "stages, tensor": (AlgorithmConfig(), {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "a ring of four": (PPO, {"context_parallel_size": 4}),
    "rings, tensor": (PPO, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "experts": (AlgorithmConfig(), {"expert_parallel_size": 2}),
}


def model(learner: dict[str, Any]) -> Any:
    if "expert_parallel_size" in learner:
        return test_mesh.model("qwen3_moe")
    return llama(num_hidden_layers=4) if "pipeline_parallel_size" in learner else llama()


def publish(shards: Shards, rank: int, ranks: int, log: Log) -> None:
    """All buckets to rank 0, twice, answered by the other ranks' threads."""

    def answer(self: ShardSnapshot) -> None:
        with Recorder(log, "answers"):
            ANSWER(self)

    ShardSnapshot._answer = answer  # type: ignore[method-assign]  # this process ends with the test
    manifest = build_manifest(shards.layout(), 4096)
    snapshot = ShardSnapshot(shards, manifest, rank=rank, ranks=ranks, seconds=60.0)
    for _ in range(2):
        snapshot.take()
        for bucket, size in enumerate(manifest.bucket_bytes if rank == 0 else ()):
            snapshot.fetch(bucket, torch.zeros(size, dtype=torch.uint8))
        barrier(ranks)  # as the controller, which asks for the next snapshot after the transfer
    snapshot.close()


def job(rank: int, ranks: int, cases: Cases) -> dict[str, tuple[Log, list[bool]]]:
    """What each case called: while it was built, in a step with empty shares, in one with unequal ones, in one that
    only the first share's data breaks, in one without gradient, and while its weights were read; and which steps it
    skipped."""
    found = {}
    for name, (algorithm, settings) in cases.items():
        config = LearnerConfig(**({"learning_rate": 1e-2, "token_budget": 20, "ranks": ranks} | settings))
        spec = BackendSpec(learner=config, algorithm=algorithm, steps=10)
        with recorded() as log:
            reference = model(settings) if algorithm.needs_reference else None
            trained = TorchBackend(model(settings), spec, reference=reference, rank=rank, ranks=ranks)
            shares, place = config.shares, rank * config.shares // ranks
            broken = random_batch(4, 3)
            broken.rewards[broken.group_ids == share(broken, 0, shares).group_ids[0]] = torch.nan
            _, empty, uneven, flat = batches()
            steps = [empty, uneven, broken, flat]
            skipped = [trained.train_step(share(batch, place, shares)).skipped for batch in steps]
            if trained.shards is not None:
                trained.score([broken.token_ids[:9]])
                publish(trained.shards, rank, ranks, log)
        found[name] = log, skipped
    return found


def check(found: list[dict[str, tuple[Log, list[bool]]]], name: str) -> list[Log]:
    logs, skipped = [of_rank[name][0] for of_rank in found], [of_rank[name][1] for of_rank in found]
    assert faults(logs) == []
    assert all(each == skipped[0] for each in skipped) and skipped[0] == [False, False, True, False]
    return logs


@pytest.fixture(scope="module")
def two() -> list[dict[str, tuple[Log, list[bool]]]]:
    return run_ranks(job, 2, 2, TWO)


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_call_alike(two: list[dict[str, tuple[Log, list[bool]]]], name: str) -> None:
    logs = check(two, name)
    shown = {"ddp": "allreduce", "stages": "send", "ring": "send", "fsdp2": "reduce_scatter_base"}[name]
    assert sum(call.name == shown for call in logs[0].calls) >= 8


@pytest.mark.thorough
def test_two_ranks_of_other_learners_call_alike() -> None:
    found = run_ranks(job, 2, 2, MORE)
    for name in MORE:
        check(found, name)


@pytest.mark.thorough
def test_four_ranks_call_alike() -> None:
    found = run_ranks(job, 4, 4, FOUR)
    for name in FOUR:
        check(found, name)


# --- the checks find what they are for -----------------------------------------------------------------------------


def swapped(kind: str, other: str) -> Any:
    """The first call ``kind`` that ``other`` follows, after it."""

    def change(calls: list[Call]) -> list[Call]:
        at = next(i for i in range(len(calls) - 1) if (calls[i].name, calls[i + 1].name) == (kind, other))
        calls[at : at + 2] = calls[at + 1], calls[at]
        return calls

    return change


def without(kind: str) -> Any:
    def change(calls: list[Call]) -> list[Call]:
        return [call for i, call in enumerate(calls) if i != max(i for i, x in enumerate(calls) if x.name == kind)]

    return change


def resized(calls: list[Call]) -> list[Call]:
    return [replace(call, what=call.what.replace("float32[", "float32[1")) for call in calls]


def in_one_group(calls: list[Call]) -> list[Call]:
    """A pipeline's directions in one group, whose calls NCCL runs in order."""
    first = next(call.group for call in calls if call.peer is not None)
    return [call if call.peer is None else replace(call, group=first) for call in calls]


PLANTED = {
    "another order": ("fsdp2", 1, swapped("allgather_base", "allreduce"), "Collective .*: rank 0 calls allgather_base"),
    "one call less": ("ddp", 0, without("allreduce"), "rank 0 calls allgather.*, rank 1 calls allreduce"),
    "another shape": ("fsdp2", 1, resized, "Collective .*: rank 0 calls .*, rank 1 calls"),
    "no answer": ("stages", 1, without("send"), "Between ranks 0 and 1 call"),
    "received before sent": ("stages", 0, swapped("send", "recv"), "wait for each other"),
    "a batch less": ("ring", 1, without("recv"), "Between ranks 0 and 1 batches differ"),
}


@pytest.mark.more
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(two: list[dict[str, tuple[Log, list[bool]]]], fault: str) -> None:
    name, rank, change, words = PLANTED[fault]
    said = faults(changed([of_rank[name][0] for of_rank in two], rank, change))
    assert said and any(re.search(words, sentence) for sentence in said), said


def test_an_exchange_of_other_sizes_is_found() -> None:
    gives = [(3, 1), (2, 5)]
    logs = [
        Log([Call("0", "alltoall_base", sizes=(gets, gives[rank]))], {"0": [0, 1]})
        for rank, gets in enumerate([(3, 2), (1, 5)])
    ]
    assert faults(logs) == []
    assert "get" in faults(changed(logs, 1, lambda calls: [replace(calls[0], sizes=((1, 4), gives[1]))]))[0]


@pytest.mark.more
def test_one_group_for_all_directions_is_found(two: list[dict[str, tuple[Log, list[bool]]]]) -> None:
    logs = [of_rank["stages"][0] for of_rank in two]
    for rank in range(2):
        logs = changed(logs, rank, in_one_group)
    assert faults(logs)
