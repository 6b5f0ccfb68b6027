"""Plans: what fits, what the closed forms prefer, and what a changed machine changes in the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrlhf.planner.choose import Chosen, Space, choose
from asyncrlhf.planner.explain import reason, sentences, weakest
from asyncrlhf.planner.layout import Layout, counts, keeps, overrides
from asyncrlhf.planner.memory import learner_bytes
from asyncrlhf.planner.ranking import Subject, bytes_of, costs_of, estimate, refusal
from asyncrlhf.planner.shapes import Cluster, Device, Link, ModelShape, Workload, nodes_for
from asyncrlhf.planner.tables import Fitted

LLAMA_8B = ModelShape(32, 4096, 14336, 128256, 32, 8, 128)
FLAT = Workload(0.0, 100.0, 0.0, 100)
HERE = Cluster(Device("this machine", 1.0, 1.0, 64e9), 1, 8, Link(0.0, 1.0), Link(0.0, 1.0))
SMALL = ModelShape(4, 128, 256, 19, 4, 4, 32, tied=True)


def measured(speed: float, workload: Workload = FLAT, **more: float) -> Subject:
    """One core makes ``speed`` rollouts/s with 10 slots, or trains 3 a second."""
    costs = Fitted((0.1 / speed, 0.0, 0.0), (0.0, 1 / 300), **more)  # type: ignore[arg-type]
    return Subject(SMALL, workload, 1, (HERE,), Layout(slots=10), costs, dtype="float32")


def planned(subject: Subject, cores: int = 8, bounds: tuple[int, ...] = (4,), keep: str = "") -> Chosen:
    """The choice where the simulator says what the closed forms say."""
    numbers = counts(cores)
    space = Space(
        [Layout(ranks=ranks) for ranks in numbers],
        [Layout(replicas=replicas, slots=10) for replicas in numbers],
        [cores],
        {"placement": ("auto",), "max_staleness": bounds, "publish_every": (1,), "batch_size": (120,)},
        [keeps(keep)] if keep else (),
    )

    def simulated(layout: Layout, seed: int) -> Mapping[str, float]:
        guess = estimate(layout, subject)
        return {
            "step_seconds": guess.step, "learner_idle": guess.learner_idle, "generator_idle": guess.held_back,
            "staleness": guess.staleness, "dropped_share": 0.0,
        }  # fmt: skip

    return choose(space, subject, lambda layout: None, simulated)


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_devices_are_split_as_queueing_says(speed: float) -> None:
    """8 cores: 6 replicas of 1 rollout/s beside 2 ranks of 3, and 5 beside 3 once replicas are twice as fast."""
    chosen = planned(measured(speed)).best.layout
    assert (chosen.replicas, chosen.ranks) == ((6, 2) if speed == 1 else (5, 3))


@pytest.mark.parametrize(("speed", "ranks"), [(3.3, 1), (6.0, 2)])
def test_a_layout_that_was_not_measured_must_be_faster_by_its_doubt(speed: float, ranks: int) -> None:
    """With a second rank, of which nothing is known, a step would be a tenth shorter, or half as long."""
    subject = measured(speed)
    subject = replace(subject, base=replace(subject.base, batch_size=120))
    chosen = planned(subject, cores=3, keep="replicas=1")
    assert chosen.best.layout.ranks == ranks
    assert ("Extrapolated figures: train" in " ".join(sentences(chosen, subject))) == (ranks > 1)
    if ranks == 1:
        faster = next(other for other in chosen.others if other.layout.ranks == 2)
        assert "9.1% faster, but by costs that were not measured at its size" in reason(faster, chosen.best)


def test_a_synchronous_step_pays_for_the_longest_response_and_for_publishing() -> None:
    """12 rollouts of 1 s an iteration on one replica of 12 slots, one rank: seconds added up by hand."""
    layout = Layout("auto", slots=12, batch_size=12, max_staleness=0)
    subject = measured(0.1)  # an iteration takes a second
    own = 100.0 + 12 * 100 / 300
    assert estimate(layout, subject).step == pytest.approx(own)
    publishing = measured(0.1, snapshot=1.0, transfer=2.0, load=4.0)
    assert estimate(layout, publishing).step == pytest.approx(own + 7.0)
    spread = Workload(0.0, 100.0, 1.0, 10_000)
    tail = 100.0 * spread.longest_of(12)
    assert tail > 200
    assert estimate(layout, measured(0.1, spread)).step == pytest.approx(tail + 4.0)


def test_the_bound_admits_one_batch_more_than_it_says() -> None:
    """Of slow messages one batch's way is shared by as many batches as are under way: bound and one."""
    assert [Layout(slots=9999, max_staleness=lag, batch_size=10).in_flight for lag in (0, 1, 4)] == [10, 20, 50]
    slow = measured(100.0, transfer=50.0)
    steps = [estimate(Layout("auto", slots=9999, max_staleness=lag, batch_size=10), slow).step for lag in (0, 1, 4)]
    assert steps[0] / steps[1] == pytest.approx(2.0) and steps[0] / steps[2] == pytest.approx(5.0)


DTYPES = ("bfloat16", "float32")


def test_bytes_of_both_sides_are_exact() -> None:
    """bfloat16 weights take 2 bytes, float32 ones 4; a cache of 128 k tokens of Llama-3-8B 16.8 GB."""
    work = Workload(1000.0, 1000.0, 0.0, 1000)
    subject = Subject(LLAMA_8B, work, 8, (nodes_for("H100", 8),), Layout())
    generator, learner = bytes_of(Layout(slots=64, sharding="2", ranks=4), subject)
    assert generator.parts["weights"] == 2 * LLAMA_8B.parameters
    assert generator.parts["key-value cache"] == 64 * 2000 * 131_072
    assert learner.parts["weights and optimizer"] == LLAMA_8B.parameters * (2 + 16 / 4)
    smaller = replace(subject, workload=replace(work, kept=250.0))
    assert bytes_of(Layout(slots=64), smaller)[0].parts["key-value cache"] == 64 * 1250 * 131_072
    assert estimate(Layout(slots=64), smaller).generation < estimate(Layout(slots=64), subject).generation, (
        "it reads less"
    )
    wide, _ = bytes_of(Layout(slots=64), replace(subject, dtype="float32"))
    assert wide.total == 2 * generator.total
    checkpointed = {d: learner_bytes(LLAMA_8B, "fsdp2", 8, 1000, dtype=d, frozen=1).parts for d in DTYPES}
    kept = {d: learner_bytes(LLAMA_8B, "fsdp2", 8, 1000, dtype=d, checkpointing=False).parts for d in DTYPES}
    assert kept["bfloat16"]["activations"] == 1000 * 32 * 34 * 4096, "34 bytes per token, layer and channel"
    assert checkpointed["bfloat16"]["activations"] == 1000 * (32 * 2 + 34) * 4096
    assert checkpointed["bfloat16"]["frozen models"] == 2 * LLAMA_8B.parameters / 8
    for name in ("activations", "frozen models"):
        assert checkpointed["float32"][name] == 2 * checkpointed["bfloat16"][name]
    assert kept["float32"]["activations"] == 2 * kept["bfloat16"]["activations"]


@pytest.mark.parametrize(
    ("cut", "held", "layer", "tokens"),
    [
        ({"learner_tensor": 2}, 16 / 2, 1 / 2, 1.0), ({"learner_pipeline": 4}, 16 / 4, 1.0, 1.0),
        ({"learner_tensor": 2, "learner_pipeline": 2}, 16 / 4, 1 / 2, 1.0),
        ({"context_parallel": 4}, 16.0, 1.0, 1 / 4),
        ({"learner_tensor": 2, "context_parallel": 2, "sharding": "fsdp2"}, 16 / 8, 1 / 2, 1 / 2),
    ],
)  # fmt: skip
def test_ranks_that_divide_layers_hold_their_parts(
    cut: Mapping[str, Any], held: float, layer: float, tokens: float
) -> None:
    """Bytes per parameter on one of 8 ranks, the part of a layer in it, and of a microbatch's tokens
    (docs/learners.md)."""
    subject = Subject(LLAMA_8B, Workload(100.0, 500.0, 0.0, 500), 8, (nodes_for("H100", 8),), Layout())
    _, learner = bytes_of(Layout(ranks=8, checkpointing=True, **cut), subject)
    gathered = 2 * LLAMA_8B.block_parameters * layer if "sharding" in cut else 0
    assert learner.parts["weights and optimizer"] == pytest.approx(held * LLAMA_8B.parameters + gathered)
    activations = (
        4096 * tokens * 4096 * (2 * 32 + 34 * layer)
    )  # of the token budget: each layer's input, one layer whole
    assert learner.parts["activations"] == pytest.approx(activations)


def trained(shape: ModelShape, tokens: int, link: Link, budget: int = 10**9, **layout: Any) -> float:
    """Seconds of a step of one model over ``tokens`` in all, on devices of 1e12 FLOP/s in use."""
    device = Device("computes", 2.5e12, 1e12, 1e15)
    subject = Subject(
        shape, FLAT, 1, (Cluster(device, 8, 8, link, link),), Layout(), token_budget=budget, kinds=()
    )  # fmt: skip
    return costs_of(Layout(**layout), subject).train([1] * tokens)  # type: ignore[no-any-return]


def test_each_way_to_divide_a_layer_costs_what_it_sends() -> None:
    """Seconds of 1,000 tokens through 32 layers of 4,096 channels over a link of 1e9 bytes/s, added up by hand: three
    passes, hidden states of 8,192 bytes a token, keys and values of 4,096."""
    free, slow = Link(0.0, 1e18), Link(0.0, 1e9)
    two = trained(LLAMA_8B, 1000, free, ranks=2, learner_tensor=2)
    assert two == pytest.approx(trained(LLAMA_8B, 1000, free) / 2)
    sums = trained(LLAMA_8B, 1000, slow, ranks=2, learner_tensor=2) - two
    assert sums == pytest.approx(3 * 32 * 2 * 1000 * 8192 / 1e9), "a ring of two sends all bytes once"
    gradients = trained(LLAMA_8B, 1000, slow, ranks=2) - two  # what compute does not hide
    ring = trained(LLAMA_8B, 1000, slow, ranks=2, context_parallel=2) - two
    assert ring - gradients == pytest.approx(3 * 32 * 500 * 4096 / 1e9)


def test_a_pipeline_waits_for_its_first_and_last_microbatches() -> None:
    free = Link(0.0, 1e18)
    plain = trained(LLAMA_8B, 1000, free) / 4
    for budget, microbatches in ((1000, 1), (250, 4), (10, 100)):
        seconds = trained(LLAMA_8B, 1000, free, budget, ranks=4, learner_pipeline=4)
        assert seconds == pytest.approx(plain * (1 + 3 / microbatches))


def test_what_is_too_large_is_named() -> None:
    work = Workload(100.0, 500.0, 0.5, 1000)
    subject = Subject(LLAMA_8B, work, 8, (nodes_for("L4", 8),), Layout())
    cut = refusal(Layout(ranks=4, learner_tensor=2, learner_pipeline=2), subject)
    assert cut is not None and "A learner rank of 4 (whole, tensor parallel 2, pipeline parallel 2) on L4" in cut
    said = refusal(Layout(ranks=4, sharding="2"), subject)
    assert said is not None and "ZeRO-2" in said and "weights and optimizer is the largest part" in said
    huge = replace(SMALL, vocabulary=200_000, hidden=16)
    said = refusal(Layout(), replace(subject, shape=huge, clusters=(replace_memory(0.6e9),), token_budget=10_000))
    assert said is not None and "logits is the largest part" in said
    space = Space([Layout()], [Layout()], [8], {"placement": ("separate",), "max_staleness": (1,)})
    with pytest.raises(ValueError, match="no layout fits these devices, for example: A learner rank of 1"):
        choose(space, subject, lambda layout: None, lambda layout, seed: {})


def replace_memory(memory: float) -> Cluster:
    cluster = nodes_for("L4", 8)
    return replace(cluster, device=replace(cluster.device, memory=memory))


def test_of_equals_the_least_staleness_then_the_fewest_devices() -> None:
    """Generators are so fast that one replica and the least bound keep one rank busy."""
    subject = measured(1000.0)
    chosen = planned(subject, bounds=(8, 2, 4), keep="ranks=1")
    assert (chosen.best.layout.max_staleness, chosen.best.layout.devices) == (2, 2)
    kept = planned(subject, bounds=(8, 2, 4), keep="quality=max_staleness>=4")
    assert kept.best.layout.max_staleness == 4


def test_generators_and_learner_lie_on_the_devices_that_suit_them() -> None:
    """Two kinds of devices: what is quick at reading memory generates, what is quick at computing trains."""
    reads = Device("reads", 2e14, 8e12, 200e9)
    computes = Device("computes", 2e15, 2e11, 200e9)
    links = Link(0.0, 1e12), Link(0.0, 1e12)
    subject = Subject(
        LLAMA_8B, Workload(100.0, 500.0, 0.0, 500), 8, (Cluster(computes, 1, 4, *links), Cluster(reads, 1, 4, *links)),
        Layout(),
    )  # fmt: skip
    steps = {
        (home, school): estimate(
            Layout(replicas=4, ranks=4, sharding="fsdp2", generators_on=home, learner_on=school), subject
        ).step
        for home in (0, 1)
        for school in (0, 1)
    }
    assert min(steps, key=lambda key: steps[key]) == (1, 0)


def test_a_plan_of_a_data_sheet_says_so() -> None:
    work = Workload(100.0, 500.0, 0.5, 1000)
    subject = Subject(LLAMA_8B, work, 8, (nodes_for("H100", 16),), Layout())
    space = Space(
        [Layout(ranks=n, sharding="fsdp2") for n in (4, 8)],
        [Layout(replicas=n) for n in (2, 4, 8)],
        [16],
        {"placement": ("separate", "flatten"), "max_staleness": (0, 2), "publish_every": (1,)},
    )

    def simulated(layout: Layout, seed: int) -> Mapping[str, float]:
        step = estimate(layout, subject).step
        return {"step_seconds": step, "learner_idle": 0, "generator_idle": 0, "staleness": 1, "dropped_share": 0}

    chosen = choose(space, subject, lambda layout: "no" if layout.ranks == 8 else None, simulated)
    words = " ".join(sentences(chosen, subject))
    assert "data sheet" in words and "expect errors of 30%" in words and "NVIDIA H100" in words
    assert chosen.best.layout.ranks == 4 and "no" in chosen.refused
    assert all(c.layout.devices <= 16 for c in (chosen.best, *chosen.others))
    assert weakest({"a": "fitted", "b": "catalogue", "c": "measured"}) == "catalogue"
    assert costs_of(chosen.best.layout, subject).train([600] * 128) == pytest.approx(
        estimate(chosen.best.layout, subject).train
    )


def test_overrides_name_every_decision() -> None:
    said = overrides(Layout(ranks=4, sharding="3", tensor=2, services=1), gpus=True, kinds=("reference",))
    assert {"learner.zero_stage=3", "generator.gpus=2", "reference.workers=1", "async.lag=null"} <= set(said)
    assert {"async.mode=sync", "async.max_staleness=null"} <= set(overrides(Layout(max_staleness=0), gpus=False))


@pytest.mark.parametrize("said", ["max_staleness", "speed<=2", "slots=many", "placement<=flatten"])
def test_nonsense_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said.partition("<=")[0].partition("=")[0]):
        keeps(said)


def test_a_freed_batch_is_judged_by_seconds_a_rollout() -> None:
    """Training has a fixed cost, which a larger batch shares: its step is longer, its rollouts are cheaper."""
    costs = Fitted((0.001, 0.0, 0.0), (1.0, 1 / 3000))
    subject = Subject(SMALL, FLAT, 1, (HERE,), Layout(slots=10), costs, dtype="float32")
    axes = {"placement": ("auto",), "max_staleness": (4,), "publish_every": (1,), "batch_size": (60, 120, 240)}
    space = Space([Layout()], [Layout(slots=10)], [8], axes)

    def simulated(layout: Layout, seed: int) -> Mapping[str, float]:
        return {"step_seconds": estimate(layout, subject).step, "staleness": 0.0}

    assert choose(space, subject, lambda layout: None, simulated).best.layout.batch_size == 240
