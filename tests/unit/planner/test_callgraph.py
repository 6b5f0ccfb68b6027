"""Calls on meshes: what shares devices takes turns, what is delayed overlaps, what stays costs nothing."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from asyncrlhf.planner.callgraph import PPO, Call, Graph, Layout, Plan, Space, layouts, meshes, placed
from asyncrlhf.planner.search import exhaustive, metropolis
from asyncrlhf.planner.shapes import Cluster, Device, Link, ModelShape, catalogue, cluster_of

SHAPE = ModelShape(4, 512, 1024, 4096, 8, 8, 64)
NODE = Cluster(Device("d", 1e14, 1e12, 8e10), 1, 4, Link(5e-6, 1e11), Link(1e-5, 1e10))
MODELS = dict.fromkeys(("actor", "reference", "reward", "critic"), SHAPE)
GRAPH = Graph(MODELS, NODE, prompt=64, response=64, batch=32)
WHOLE = Layout(0, 4, 1, 4)


class Fixed(Graph):
    """Calls whose seconds are given by hand, and free reallocation."""

    def seconds(self, call: Call, layout: Layout) -> float:
        return {"generate": 3.0, "infer": 1.0, "train": 2.0}[call.kind]

    def reallocation(self, model: str, source: Layout, target: Layout) -> float:
        return 0.0


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    return tuple(rng.choice(options) for options in Space(GRAPH, placed(GRAPH, "any")).options)


@pytest.mark.parametrize("seed", range(10))
def test_two_calls_that_share_a_device_never_overlap(seed: int) -> None:
    plan = random_plan(seed)
    where = dict(zip((call.name for call in PPO), plan, strict=True))
    rows = [row for row in GRAPH.timeline(plan) if row[0] in where]
    assert len(rows) == 5 * len(PPO)
    for (one, _, start, end), (other, _, begun, ended) in itertools.combinations(rows, 2):
        a, b = where[one].mesh, where[other].mesh
        if a.start < b.stop and b.start < a.stop:
            assert end <= begun + 1e-12 or ended <= start + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_a_call_waits_for_its_parents_and_for_the_weights(seed: int) -> None:
    ends = {(name, batch): end for name, batch, _, end in GRAPH.timeline(random_plan(seed))}
    starts = {(name, batch): start for name, batch, start, _ in GRAPH.timeline(random_plan(seed))}
    for call, batch in itertools.product(PPO, range(5)):
        assert all(ends[parent, batch] <= starts[call.name, batch] for parent in call.after)
    assert all(ends["actor training", batch] <= starts["generation", batch + 1] for batch in range(4))


def test_one_mesh_is_the_sum_of_its_calls() -> None:
    seconds = sum(GRAPH.seconds(call, WHOLE) for call in PPO)
    assert GRAPH.makespan((WHOLE,) * 6) == pytest.approx(5 * seconds)


def test_a_delayed_edge_shortens_the_makespan_as_by_hand() -> None:
    """Generation (3) on its own half; on the other three inferences (1 each) and two trainings (2 each): 7 in turn. In
    step: 5 x (3 + 7), but the critic's training overlaps the next generation where the actor's went first: 2 less, four
    times. One batch ahead: the first generation, then 7 a batch."""
    first, second = Layout(0, 2, 1, 2), Layout(2, 2, 1, 2)
    plan = (first, *[second] * 5)
    graph = Fixed(MODELS, NODE, 64, 64, 32)
    assert graph.makespan(plan) == 5 * (3 + 7) - 4 * 2
    assert replace(graph, delay=1).makespan(plan) == 3 + 5 * 7


def test_weights_that_stay_cost_nothing_and_a_smaller_share_less() -> None:
    half = Layout(0, 4, 1, 2)
    assert GRAPH.reallocation("actor", WHOLE, WHOLE) == 0
    size, link = 2.0 * SHAPE.parameters, NODE.intra
    assert GRAPH.reallocation("actor", WHOLE, half) == pytest.approx(link.latency + size / 4 / link.bandwidth)
    apart = GRAPH.reallocation("actor", Layout(0, 2, 1, 2), Layout(2, 2, 1, 2))
    assert apart == pytest.approx(link.latency + size / 2 / link.bandwidth)


def test_a_plan_that_holds_too_much_is_infinite() -> None:
    small = replace(NODE, device=replace(NODE.device, memory=1e8))
    assert GRAPH.cost((WHOLE,) * 6) < float("inf")
    assert replace(GRAPH, cluster=small).cost((WHOLE,) * 6) == float("inf")


def test_layouts_fill_their_mesh_and_divide_the_model() -> None:
    two = replace(NODE, nodes=2)
    assert set(meshes(two)) >= {(0, 8), (0, 4), (4, 4), (0, 2), (6, 2), (7, 1)}
    for layout in layouts(replace(GRAPH, cluster=two), PPO[0], (0, 8)):
        assert layout.pipeline * layout.tensor * layout.data == 8
        assert SHAPE.layers % layout.pipeline == 0 and layout.tensor <= two.per_node


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_is_within_two_percent_of_the_best_plan(seed: int) -> None:
    """A space of two calls that are the whole of a small graph: generation and the training that follows it."""
    calls = (PPO[0], Call("actor training", "actor", "train", ("generation",)))
    graph = replace(GRAPH, calls=calls, response=[16, 64, 256][seed], batch=[8, 32, 128][seed])
    space = Space(graph, placed(graph, "any"))
    best = exhaustive(list(itertools.product(*space.options)), space.cost)
    found = metropolis(space, 100, seed)
    assert found.asked < best.asked and found.cost <= 1.02 * best.cost


def test_a_part_of_the_devices_can_beat_all_of_them() -> None:
    """With a delay two disjoint meshes work side by side: the search finds a plan quicker than one mesh for all."""
    graph = replace(GRAPH, delay=1)
    together = metropolis(Space(graph, placed(graph, "flatten")), 50, 0).cost
    assert metropolis(Space(graph, placed(graph, "any")), 200, 0).cost <= together


def test_the_catalogue_has_a_source_for_each_device() -> None:
    for name in catalogue():
        cluster = cluster_of(name, 8)
        assert cluster.device.source and 1e13 < cluster.device.flops < 1e16
        assert cluster.inter.bandwidth <= cluster.intra.bandwidth < cluster.device.bandwidth
    with pytest.raises(ValueError, match="H1000 is not a device"):
        cluster_of("H1000", 8)
    with pytest.raises(ValueError, match="9 devices do not fill nodes of 8"):
        cluster_of("H100", 9)
