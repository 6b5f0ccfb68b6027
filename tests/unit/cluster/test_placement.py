"""Placements as a pure function: who shares which device, what Ray is asked for, and what no cluster could hold."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlhf.cluster.nodes import Node, keep_apart, shortage, this_machine
from asyncrlhf.cluster.parts import generator_specs, placement_plan
from asyncrlhf.cluster.placement import Part, Plan, add_replica, make_plan
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.start.preflight import check_devices


def parts(
    ranks: int = 1, replicas: int = 1, rewards: int = 1, *, learner: float = 0.0, generator: float = 0.0,
    reward: float = 0.0, threads: int = 1, workers: int = 1, stages: int = 1,
) -> list[Part]:  # fmt: skip
    return [
        *(Part(f"learner-{i}", "learner", threads, learner) for i in range(ranks)),
        *(Part(f"generator-{i}", "generator", threads, generator, workers, stages) for i in range(replicas)),
        *(Part(f"reward-{i}", "reward", 0, reward) for i in range(rewards)),
    ]


def node(name: str, cpus: float, gpus: float = 0.0, free: tuple[float, float] | None = None) -> Node:
    left = free or (cpus, gpus)
    return Node(name, {"CPU": cpus, "GPU": gpus}, {"CPU": left[0], "GPU": left[1]})


def demands(plan: Plan) -> dict[tuple[str, int], dict[str, float]]:
    """What all actors in each bundle ask of Ray together, the engine's workers included."""
    asked: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seat in plan.seats.values():
        if seat.group:
            for kind, amount in seat.demand().items():
                asked[seat.group, seat.bundles[0]][kind] += amount
            for place in seat.bundles if len(seat.bundles) > 1 else ():
                asked[seat.group, place]["GPU"] += seat.worker_gpus
    return asked


def assert_demands_fit(plan: Plan) -> None:
    bundles = {(group.name, i): bundle for group in plan.groups for i, bundle in enumerate(group.bundles)}
    for place, asked in demands(plan).items():
        for kind, amount in asked.items():
            assert amount <= bundles[place].get(kind, 0.0) + 1e-6, (place, kind)


def side_of(plan: Plan, part: str) -> str:
    return next(group.side for group in plan.groups if part in group.seats)


def devices_of(plan: Plan, kind: str) -> set[tuple[str, int]]:
    return {(s.group, i) for name, s in plan.seats.items() if name.startswith(kind) for i in s.bundles}


def test_a_laptop_is_left_to_ray() -> None:
    plan = placement_plan(load_config(["generator.replicas=2", "learner.ranks=2", "generator.threads=3"]))
    assert plan.placement == "auto" and plan.groups == () and not plan.sharing
    assert {name: seat.demand() for name, seat in plan.seats.items()} == {
        "learner-0": {"CPU": 1}, "learner-1": {"CPU": 1}, "generator-0": {"CPU": 3}, "generator-1": {"CPU": 3},
        "reward-0": {},
    }  # fmt: skip
    assert make_plan("auto", parts(generator=0.5, learner=0.5), nodes=1).total("GPU") == 1, "fractions share a GPU"
    assert make_plan("auto", parts(), nodes=2).placement == "separate"


def test_separate_has_two_sets_of_devices() -> None:
    plan = make_plan("separate", parts(2, 3, 2, learner=1, generator=1, reward=0.25), nodes=1)
    assert plan.total("GPU") == 6, "the reward workers' quarters share one GPU of the generators' side"
    assert not devices_of(plan, "learner") & (devices_of(plan, "generator") | devices_of(plan, "reward"))
    assert {side_of(plan, f"{kind}-0") for kind in ("generator", "reward")} == {"generators"}
    assert make_plan("separate", parts(), nodes=1).seats["reward-0"].group == "", "a rule needs no device"
    assert_demands_fit(plan)


def test_fractions_of_one_side_share_a_gpu_and_those_of_two_sides_never_do() -> None:
    plan = make_plan("separate", parts(1, 3, learner=0.5, generator=0.5), nodes=1)
    assert plan.seats["generator-0"].group == plan.seats["generator-1"].group != plan.seats["generator-2"].group
    assert plan.total("GPU") == 3 and plan.seats["learner-0"].group == "learner"
    assert_demands_fit(plan)


def test_interleave_has_three_sets_of_devices() -> None:
    plan = make_plan("interleave", parts(2, 2, 2), nodes=1)
    assert (
        len(devices_of(plan, "learner")) == len(devices_of(plan, "generator")) == len(devices_of(plan, "reward")) == 2
    )
    assert len({place for kind in ("learner", "generator", "reward") for place in devices_of(plan, kind)}) == 6
    assert plan.total("CPU") == 6 and not plan.sharing


def test_flatten_shares_cpus_and_the_larger_tenant_sets_the_size() -> None:
    both = [Part("learner-0", "learner", 4, 0), Part("generator-0", "generator", 1, 0)]
    plan = make_plan("flatten", [*both, Part("generator-1", "generator", 1, 0)], nodes=1)
    assert plan.seats["learner-0"].group == plan.seats["generator-0"].group == "generator-0"
    assert plan.sharing == {"generator-0"}, "the second one has a device of its own and works on"
    assert [dict(b) for b in plan.bundles()] == [{"CPU": 4}, {"CPU": 1}]
    assert_demands_fit(plan)


def test_flatten_with_more_ranks_than_devices_gives_the_rest_their_own() -> None:
    plan = make_plan("flatten", parts(4, 2, learner=1, generator=1), nodes=1)
    assert plan.sharing == {"generator-0", "generator-1"} and plan.total("GPU") == 4
    assert side_of(plan, "learner-3") == "learner" and side_of(plan, "learner-1") == "generators"
    assert_demands_fit(plan)


def test_eight_generators_of_four_gpus_beside_four_ranks() -> None:
    common = dict(learner=1.0, generator=4.0, workers=4)
    apart = make_plan("separate", parts(4, 8, **common), nodes=9)
    assert apart.total("GPU") == 36
    # One bundle of four GPUs lies on one node by itself, and vLLM's workers are children of the actor that holds them.
    assert [dict(g.bundles[0]) for g in apart.groups if g.side == "generators"] == [{"CPU": 1, "GPU": 4}] * 8
    shared = make_plan("flatten", parts(4, 8, **common), nodes=8)
    assert shared.total("GPU") == 32 and shared.sharing == {"generator-0"}
    first = next(g for g in shared.groups if g.name == "generator-0")
    assert first.strategy == "STRICT_PACK" and [b["GPU"] for b in first.bundles] == [1, 1, 1, 1]
    assert [shared.seats[f"learner-{i}"].bundles for i in range(4)] == [(0,), (1,), (2,), (3,)]
    assert shared.seats["generator-0"].worker_gpus == 0.5 and shared.seats["generator-1"].worker_gpus == 1
    assert_demands_fit(apart)
    assert_demands_fit(shared)


def test_pipeline_stages_may_lie_on_several_nodes() -> None:
    plan = make_plan("separate", parts(1, 1, learner=1, generator=16, workers=16, stages=2), nodes=3)
    group = next(g for g in plan.groups if g.side == "generators")
    assert group.strategy == "PACK" and len(group.bundles) == 16
    eight = [node(str(i), 64, 8) for i in range(3)]
    assert shortage(plan, eight) is None
    whole = make_plan("separate", parts(1, 1, learner=1, generator=16, workers=16), nodes=3)
    assert "generator-0 needs 16 GPUs + 1 CPU on one node" in str(shortage(whole, eight))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (parts(learner=2, generator=1), "learner-0 asks for 2; allowed: at most 1"),
        (parts(learner=0, generator=1), "no generator is on the CPU"),
        (parts(learner=1, generator=0), "no generator is on a GPU"),
    ],
)
def test_flatten_without_anything_to_share_is_refused(given: list[Part], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan("flatten", given, nodes=1)


def test_one_and_a_half_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator-0 asks for 1.5 GPUs; allowed: a whole number, or less than 1"):
        placement_plan(load_config(["generator.gpus=1.5"]))


@given(
    placement=st.sampled_from(["auto", "separate", "interleave", "flatten"]),
    ranks=st.integers(1, 5),
    replicas=st.integers(1, 8),
    rewards=st.integers(1, 3),
    learner=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    generator=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    reward=st.sampled_from([0.0, 0.4, 1.0]),
    nodes=st.integers(1, 3),
)  # fmt: skip
def test_every_plan_seats_everyone_and_overbooks_nothing(
    placement: str, ranks: int, replicas: int, rewards: int, learner: float, generator: float, reward: float, nodes: int
) -> None:
    given_parts = parts(ranks, replicas, rewards, learner=learner, generator=generator, reward=reward)
    if placement == "flatten" and bool(learner) != bool(generator):
        return
    plan = make_plan(placement, given_parts, nodes)
    assert plan.seats.keys() == {p.name for p in given_parts}
    assert_demands_fit(plan)
    learners, generators = devices_of(plan, "learner"), devices_of(plan, "generator")
    if placement in ("separate", "interleave"):
        assert not learners & generators
    if placement == "interleave":
        assert not devices_of(plan, "reward") & (learners | generators)
    on_device = {
        n for n, s in plan.seats.items() if n.startswith("gen") and {(s.group, i) for i in s.bundles} & learners
    }
    assert plan.sharing == (on_device if placement == "flatten" else set())
    # A single node that has all of it is enough, and one CPU or GPU less is refused.
    enough = node("n", plan.total("CPU"), math.ceil(plan.total("GPU") - 1e-6))
    assert shortage(plan, [enough]) is None
    if plan.total("GPU") >= 1:
        assert shortage(plan, [node("n", 100, plan.total("GPU") - 1)]) is not None
    if plan.total("CPU") >= 1:
        assert shortage(plan, [node("n", plan.total("CPU") - 1, 100)]) is not None


def test_a_replica_that_comes_later_gets_a_device_of_its_own() -> None:
    late = Part("generator-9", "generator", 2, 0)
    for placement in ("separate", "interleave", "flatten"):
        plan = add_replica(make_plan(placement, parts(1, 1), nodes=1), late)
        assert side_of(plan, "generator-9") == "generators" and plan.seats["generator-9"].group == "generator-9"
        assert "generator-9" not in plan.sharing
        assert_demands_fit(plan)
    assert add_replica(make_plan("auto", parts(), nodes=1), late).seats["generator-9"].demand() == {"CPU": 2}


def test_sides_get_nodes_of_their_own_where_there_are_enough() -> None:
    three = [node("a", 8), node("b", 2), node("c", 4)]
    apart = keep_apart(make_plan("interleave", parts(2, 4, 2), nodes=3), three)
    assert apart == {"learner": {"b"}, "rewards": {"c"}}, "the smallest that hold them, so that the generators have a"
    two = keep_apart(make_plan("interleave", parts(2, 4, 2), nodes=2), [node("a", 8), node("b", 2)])
    assert two == {"learner": {"b"}}, "with too few nodes the learner's comes first"
    assert keep_apart(make_plan("separate", parts(2, 2), nodes=2), [node("a", 3), node("b", 1)]) == {}
    assert keep_apart(make_plan("flatten", parts(2, 2), nodes=3), three) == {}


def test_what_others_hold_is_left_alone() -> None:
    busy = [node("a", 2, free=(0, 0)), node("b", 2), node("c", 2)]
    assert keep_apart(make_plan("separate", parts(2, 2), nodes=3), busy) == {"learner": {"b"}}


def test_a_shortage_says_what_is_asked_and_what_there_is() -> None:
    plan = make_plan("separate", parts(1, 2, learner=1, generator=1), nodes=1)
    assert shortage(plan, [this_machine(plan, gpus=3)]) is None
    sentence = str(shortage(plan, [node("a", 8, 2)]))
    assert (
        sentence == "The run needs 3 GPUs + 3 CPUs (cluster.placement=separate), but Ray has 2 GPUs + 8 CPUs on 1 node."
    )
    wide = make_plan("separate", parts(1, 2, threads=6), nodes=2)
    assert "learner needs 6 CPUs on one node" in str(shortage(wide, [node("a", 5), node("b", 5)]))
    # In sum there is enough, but of three times six CPUs only two go into two nodes of nine.
    assert "3 times 6 CPUs" in str(shortage(wide, [node("a", 9), node("b", 9)]))


H100, L4 = {"zone": "a", "card": "H100"}, {"card": "L4"}


def labelled(*, learner: dict[str, str], generator: dict[str, str]) -> list[Part]:
    wanted = {"learner": learner, "generator": generator}
    return [replace(part, labels=wanted.get(part.kind, {})) for part in parts(1, 2, learner=1, generator=1)]


def test_labels_choose_the_nodes_of_each_side() -> None:
    plan = make_plan("separate", labelled(learner=H100, generator=L4), nodes=3)
    assert [(group.name, dict(group.labels)) for group in plan.groups] == [
        ("learner", H100), ("generator-0", L4), ("generator-1", L4),
    ]  # fmt: skip
    big, small, plain = (replace(node(name, 4, 2), labels=of) for name, of in (("h", H100), ("l", L4), ("p", {})))
    assert shortage(plan, [big, small, plain]) is None
    assert keep_apart(plan, [plain, small, big]) == {"learner": {"h"}}
    # In sum there is enough, but not on nodes with the label.
    assert str(shortage(plan, [small, plain])) == (
        "learner needs 1 GPU + 1 CPU with card=H100 and zone=a on one node, but Ray has 4 GPUs + 8 CPUs on 2 nodes, "
        "and no node has as much."
    )
    only = replace(node("l", 4, 1), labels=L4)
    assert "2 times 1 GPU + 1 CPU with card=L4" in str(shortage(plan, [big, only, plain]))
    late = add_replica(plan, replace(parts(0, 1, 0, generator=1)[0], name="generator-9", labels=L4))
    assert late.groups[-1].labels == L4
    assert "only 2 of them fit" in str(shortage(late, [big, small, plain]))


def test_parts_without_devices_keep_their_labels() -> None:
    auto = make_plan("auto", labelled(learner=H100, generator=L4), nodes=1)
    assert {name: dict(seat.labels) for name, seat in auto.seats.items()} == {
        "learner-0": H100, "generator-0": L4, "generator-1": L4, "reward-0": {},
    }  # fmt: skip
    assert "learner-0 needs 1 GPU + 1 CPU with card=H100 and zone=a" in str(shortage(auto, [node("a", 8, 8)]))


def test_who_shares_a_device_agrees_on_its_labels() -> None:
    with pytest.raises(ConfigError, match=r"wants card=H100 for the one and L4 for the others"):
        make_plan("flatten", labelled(learner=H100, generator=L4), nodes=1)
    shared = make_plan("flatten", labelled(learner={"zone": "a"}, generator=L4), nodes=1)
    assert [dict(group.labels) for group in shared.groups] == [{"zone": "a", **L4}, L4]
    halves = [Part(f"reward-{i}", "reward", 0, 0.5, labels=of) for i, of in enumerate((L4, H100, L4))]
    seats = make_plan("interleave", [*parts(1, 1, 0), *halves], nodes=1).seats
    assert seats["reward-0"].group == seats["reward-2"].group != seats["reward-1"].group


def test_one_gpu_holds_the_learner_and_all_generators_whatever_else_there_is() -> None:
    asked = [*parts(1, 2, learner=0.4, generator=0.3), Part("reward-1", "reward", 2, 0)]
    plan = make_plan("one_gpu", asked, nodes=3)
    (group,) = plan.groups
    assert_demands_fit(plan)
    assert set(group.seats) == {"learner-0", "generator-0", "generator-1"} and len(group.bundles) == 1
    assert plan.total("GPU") == 1 and not plan.sharing and plan.seats["reward-1"].cpus == 2
    assert shortage(plan, [node("a", 8, 1)]) is None
    assert "needs 1 GPU" in str(shortage(plan, [node("a", 8, 0)]))
    labels = make_plan("one_gpu", [replace(p, labels=L4 if p.kind == "learner" else {}) for p in asked], nodes=1)
    assert labels.groups[0].labels == L4


@pytest.mark.parametrize(("learner", "generator", "count"), [(0.5, 0.5, 2), (0.5, 0, 1), (0, 0.5, 1), (1, 0.5, 1)])
def test_shares_that_are_none_of_one_gpu_are_refused(learner: float, generator: float, count: int) -> None:
    with pytest.raises(ConfigError, match=r"one_gpu deals out one GPU, and the shares of it are learner-0 "):
        make_plan("one_gpu", parts(1, count, learner=learner, generator=generator), nodes=1)
    words = [f"learner.gpus={learner}", f"generator.gpus={generator}", f"generator.replicas={count}"]
    with pytest.raises(ConfigError, match=r"one_gpu deals out one GPU, and learner.gpus=.* at most 1 in the sum"):
        load_config(["cluster=one_gpu", *words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("learner.ranks=2", "learner.gpus=0.2"), "learner.ranks=1"),
        (("generator.max_replicas=2", "generator.gpus=0.2"), "no further GPU that replicas could join on"),
        (("reward.gpus=0.1",), r"not with reward\.gpus=0\.1; allowed"),
        (("cluster.offload=true",), "use in turns, and under cluster.placement=one_gpu they do not"),
    ],
)
def test_what_one_gpu_cannot_hold_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(["cluster=one_gpu", *words])


def test_labels_need_a_cluster() -> None:
    for runtime in ("ray", "local"):
        with pytest.raises(ConfigError, match=r"cluster.node_labels=.* chooses among the nodes of a cluster, and"):
            check_devices(load_config([f"runtime={runtime}", "cluster.node_labels={learner:{card:H100}}"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("3", "node_labels=3 is not a mapping"),
        ("{learners:{a:b}}", "node_labels.learners is no kind of parts; allowed: null, or .* one of learner, gen"),
        ("{learner:H100}", "node_labels.learner=H100 is not a mapping"),
        ("{learner:{card:3}}", "learner.card=3 is not a label with a text"),
    ],
)
def test_labels_that_are_none_are_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([f"cluster.node_labels={given}"])


def test_this_machine_shares_its_cores() -> None:
    plan = make_plan("auto", parts(4, 60), nodes=1)
    assert shortage(plan, [this_machine(plan, gpus=0)]) is None


def test_too_few_gpus_end_in_a_sentence_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrlhf.orchestrator import run
    from asyncrlhf.orchestrator.start import preflight

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    config = load_config(["generator.gpus=1", "learner.gpus=1"])
    with pytest.raises(
        ConfigError, match=r"needs 2 GPUs.*Ray has 1 GPU.*cluster.placement=flatten generators and learn"
    ):
        run.prepare(config)
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"ray.address names no cluster\.$"):
        run.prepare(config)
    with pytest.raises(ConfigError, match="torch sees 0 on this machine"):
        run.prepare(load_config(["generator.gpus=1", "runtime=local"]))


@pytest.mark.parametrize(
    ("overrides", "sleeps"),
    [
        (["cluster.placement=flatten", "generator.gpus=1"], True),
        (["cluster.placement=separate", "generator.gpus=1"], False),
        (["cluster.placement=flatten", "generator.gpus=0"], False),
    ],
)
def test_vllm_replicas_that_share_gpus_with_the_learner_can_sleep(overrides: list[str], sleeps: bool) -> None:
    config = load_config(["generator=vllm", "learner.gpus=1", *overrides])
    assert [bool(spec.generator.vllm.sleep_level) for spec in generator_specs(config)] == [sleeps]
