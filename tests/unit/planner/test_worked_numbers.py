"""Every worked number that the planner's design and the papers print, and the closed forms behind them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.planner.costs import (
    Coefficients,
    CostModel,
    all_reduce,
    broadcast,
    forward_flops,
    gloo_tree,
    relay,
)
from asyncrlhf.planner.memory import generator_bytes, layout_bytes, learner_bytes
from asyncrlhf.planner.ranking import steady
from asyncrlhf.planner.shapes import Cluster, Device, Link, ModelShape, Workload, catalogue, cluster_of, longest_of

ROOT = Path(__file__).resolve().parents[3]
LLAMA_2_7B = ModelShape(32, 4096, 11008, 32000, 32, 32, 128)
LLAMA_3_8B = ModelShape(32, 4096, 14336, 128256, 32, 8, 128)
H100 = Device("H100", 989e12, 3.35e12, 80e9)
NODES = Cluster(H100, 8, 8, Link(5e-6, 2e11), Link(1e-5, 4e10))


def test_parameters_and_cache_of_published_models() -> None:
    assert LLAMA_2_7B.parameters == 6_738_415_616
    assert LLAMA_3_8B.parameters == 8_030_261_248
    assert LLAMA_2_7B.kv_bytes == 524_288
    assert LLAMA_3_8B.kv_bytes == 131_072


def test_shape_of_a_checkpoint_counts_its_own_parameters(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    assert ModelShape.from_config(tiny_model_path).parameters == sum(p.numel() for p in model.parameters())


def test_collectives() -> None:
    assert all_reduce(Link(5e-6, 2e11), 8, 1e9) == pytest.approx(8.82e-3, rel=1e-3)
    assert all_reduce(Link(5e-6, 2e11), 1, 1e9) == 0
    assert broadcast(Link(1e-3, 1e9), 5, 2e9) == pytest.approx(2.003)


def test_a_publish_to_many_receivers_takes_what_was_measured() -> None:
    """Over links of 1 Gbit/s, of which TCP leaves 0.985 (experiment 38). 16 receivers are on four machines."""
    measured = json.loads((ROOT / "experiments/38_sparse_versions/link.json").read_text())["rows"]
    seconds = {(row["way"], row["receivers"]): row["median"] for row in measured}
    size, link = next(row["bytes"] for row in measured if row["way"] == "whole"), Link(1e-4, 0.985 * 1e9 / 8)
    own = 0.12  # of checksums and loads, which no link changes
    loads = 12 * 0.084 / 2  # of neighbours, which share two cores
    predicted = {
        ("whole", 1): gloo_tree(link, 1, size), ("whole", 4): gloo_tree(link, 4, size),
        ("whole relay", 4): relay(link, 4, size), ("whole relay", 16): relay(link, 4, size) + loads,
        ("one group for each receiver", 16): 16 * gloo_tree(link, 1, size),
    }  # fmt: skip
    for case, expected in predicted.items():
        assert seconds[case] == pytest.approx(expected + own, rel=0.15), case
    # A thousand replicas of 8 workers each, 16 GB, links of 200 Gbit/s.
    fast = Link(5e-6, 25e9)
    assert 8000 * gloo_tree(fast, 1, 16e9) > 5000
    assert gloo_tree(fast, 1000, 16e9) > 6 and relay(fast, 1000, 16e9) < 0.75


@pytest.mark.parametrize(
    ("transport", "replicas", "workers", "seconds", "relayed"),
    [
        ("auto", 64, 1, 16e9 / 4e10, False),  # one broadcast to all
        ("auto", 64, 8, 16e9 / 4e10 + 63e-3, True),  # one copy to each machine
        ("collective", 64, 8, 64 * 16e9 / 4e10, False),  # a broadcast for each replica
        ("relay", 1000, 8, 16e9 / 4e10 + 999 * (1e-3 + 2**20 / 4e10), True),
        ("auto", 2, 2, 2 * 16e9 / 2e11, False),  # within a machine its own link is faster than its host's memory
        ("auto", 1, 8, 16e9 / 4e10, False),  # a relay would be faster by a latency
    ],
)
def test_the_learners_link_carries_the_weights_once_for_each_replica_with_workers_of_its_own(
    transport: str, replicas: int, workers: int, seconds: float, relayed: bool
) -> None:
    cluster = Cluster(H100, 1001, 8, Link(1e-3, 2e11), Link(1e-3, 4e10))
    costs = CostModel(LLAMA_3_8B, cluster, tensor=workers, replicas=replicas, transport=transport)
    assert costs.relayed == relayed
    assert costs.transfer == pytest.approx(seconds * 2 * LLAMA_3_8B.parameters / 16e9, rel=0.07)


@pytest.mark.parametrize(("cv", "count", "ratio"), [(0.5, 256, 3.46), (1.0, 512, 9.4)])
def test_the_longest_of_many_responses(cv: float, count: int, ratio: float) -> None:
    assert longest_of(1.0, cv, count) == pytest.approx(ratio, rel=0.01)
    s = math.sqrt(math.log1p(cv**2))
    drawn = np.exp(s * np.random.default_rng(0).standard_normal((4000, count)) - s**2 / 2).max(axis=1).mean()
    assert longest_of(1.0, cv, count) == pytest.approx(drawn, rel=0.02)


def test_recorded_lengths_give_the_same_longest_as_their_law() -> None:
    law = Workload(10, 200, 0.5, 10_000)
    seen = Workload.from_lengths(10, [law.length(seed) for seed in range(20_000)])
    assert seen.longest_of(8) == pytest.approx(law.longest_of(8), rel=0.03)


def test_memory_of_our_learner() -> None:
    assert layout_bytes(70e9, "3", 16) == pytest.approx(78.75e9)
    assert [layout_bytes(1.0, layout, 4, "float32") for layout in ("0", "1", "2", "3", "fsdp2")] == [16, 11, 8, 5, 4]
    assert [layout_bytes(1.0, layout, 4) for layout in ("0", "1", "2", "3", "fsdp2")] == [16, 9, 6, 4.5, 4]


def test_a_layout_that_is_too_large_is_refused_with_its_largest_part() -> None:
    held = learner_bytes(LLAMA_3_8B, "2", 8, 16_384)
    assert held.refusal(80e9, "A rank") is None
    said = learner_bytes(LLAMA_3_8B, "0", 8, 16_384).refusal(80e9, "A rank")
    assert said is not None and "weights and optimizer is the largest part" in said and "73.6 usable GB" in said
    assert generator_bytes(LLAMA_2_7B, 1000, 2).total == LLAMA_2_7B.parameters + 1000 * 524_288 / 2


def test_a_forward_pass_counts_attention_by_the_square() -> None:
    assert forward_flops(LLAMA_2_7B, [100, 200]) == 2 * 6_738_415_616 * 300 + 2 * 32 * 4096 * 50_000


def test_decode_is_bound_by_memory_and_then_by_compute() -> None:
    model = CostModel(LLAMA_3_8B, NODES, fitted=Coefficients(compute=0.5, memory=0.8, layer=0))
    read = (2 * LLAMA_3_8B.parameters + 1024 * 131_072) / (0.8 * 3.35e12)
    assert model.decode(1, 1024) == pytest.approx(read)
    flops = 2.0 * LLAMA_3_8B.parameters * 4096 + 4 * 32 * 4096 * 4096 * 10
    assert model.decode(4096, 10) == pytest.approx(flops / (0.5 * 989e12))


def test_the_device_works_while_the_host_launches() -> None:
    """1 ms per layer hides a small batch's reads, and the compute of a large one hides the launches."""
    fast, slow = (CostModel(LLAMA_3_8B, NODES, fitted=Coefficients(layer=layer)) for layer in (0.0, 1e-3))
    assert slow.decode(1, 1024) == pytest.approx(32e-3) and fast.decode(1, 1024) < 32e-3
    assert slow.decode(60_000, 10) == fast.decode(60_000, 10) > 32e-3


@pytest.mark.parametrize(
    ("ratio", "eta", "siblings", "step", "idle", "staleness"),
    [
        (0.6, 16, 1.0, 1.227, 0.400, (1.60, 1.60)),
        (0.3, 16, 1.0, 1.227, 0.700, (1.30, 1.30)),
        (0.6, 16, 1.89, 1.227, 0.400, (2.49, 2.49)),
        (1.6, 8, 1.0, 1.964, 0.0, (7.5, 8.0)),
        (1.6, 3, 1.0, 1.964, 0.0, (2.5, 3.0)),
    ],
)
def test_closed_forms_of_asynchrony(
    ratio: float, eta: int, siblings: float, step: float, idle: float, staleness: tuple[float, float]
) -> None:
    """Batches and slots of 64. Generation takes 1.227 s a batch; where it is the faster side, the learner 1.964 s."""
    generation = 64 / 1.227 if ratio < 1 else 64 / (1.964 / ratio)
    found = steady(generation, generation / ratio, 64, 64, eta, siblings)
    assert found.step == pytest.approx(step, rel=1e-3)
    assert found.learner_idle == pytest.approx(idle, abs=1e-3)
    assert found.staleness == pytest.approx(staleness, abs=0.01)


def test_the_catalogue_has_a_source_for_each_device() -> None:
    for name in catalogue():
        cluster = cluster_of(name, 8)
        assert cluster.device.source and 1e13 < cluster.device.flops < 1e16
        assert cluster.inter.bandwidth <= cluster.intra.bandwidth < cluster.device.bandwidth
    with pytest.raises(ValueError, match="H1000 is not a device"):
        cluster_of("H1000", 8)
    with pytest.raises(ValueError, match="9 devices do not fill nodes of 8"):
        cluster_of("H100", 9)
