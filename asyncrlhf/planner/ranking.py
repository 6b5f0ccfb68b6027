"""Memory and speed of a layout by tables and closed forms; they select the layouts worth simulating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from asyncrlhf.planner.costs import CostModel, all_gather, all_reduce, forward_flops
from asyncrlhf.planner.layout import Layout
from asyncrlhf.planner.memory import Bytes, generator_bytes, layout_bytes, learner_bytes
from asyncrlhf.planner.shapes import Cluster, ModelShape, Workload
from asyncrlhf.planner.tables import Fitted

DOUBT = 0.3  # share of a step by which a cost is wrong that was not measured at a layout's size
MESSAGE = 0.005  # seconds per call between actors, if not measured
HOST_LINK = 25e9  # bytes/s between a device and its host (PCIe 4.0 x16), for offloaded optimizers
ASLEEP = 2e9  # bytes that a sleeping vLLM keeps on its device: CUDA context and graphs


@dataclass(frozen=True)
class Subject:
    """What is planned.

    Args:
        siblings: rollouts per prompt.
        clusters: the machine's groups of devices; the cores of a CPU are one group of devices with shared memory.
        measured: costs of this machine; None: those of the catalogue.
        base: the layout under which they were measured.
        kinds: models that the algorithm needs beside the policy: ``reference``, ``critic``.
        token_budget: packed tokens per pass of the learner.
        transport: ``weights.transport``.
    """

    shape: ModelShape
    workload: Workload
    siblings: int
    clusters: tuple[Cluster, ...]
    base: Layout
    measured: Fitted | None = None
    kinds: tuple[str, ...] = ()
    token_budget: int = 4096
    dtype: str = "bfloat16"
    transport: str = "auto"

    def extrapolated(self, layout: Layout) -> list[str]:
        """The costs that were not measured at this layout's size, of ``decode`` and ``train``."""
        base = self.base
        beyond = {
            "decode": layout.slots > base.slots or layout.replicas > base.replicas,
            "train": (layout.ranks, layout.batch_size) != (base.ranks, base.batch_size),
        }
        return [name for name, larger in beyond.items() if larger and self.measured is not None]

    def doubt(self, layout: Layout) -> float:
        """The factor by which a step may be longer than predicted, from the costs that were not measured."""
        return float((1 + DOUBT) ** len(self.extrapolated(layout)))


@dataclass(frozen=True)
class CatalogueCosts:
    """Seconds on devices of the catalogue; satisfies ``cluster.cost_world.Costs``. Each side may have its own device.

    Args:
        asks: forward passes of the learner over the batch for models beside the policy.
        trains: number of models trained: two with a critic.
        token_budget: packed tokens per pass of the learner.
    """

    generators: CostModel
    learner: CostModel
    layout: Layout
    asks: int = 0
    trains: int = 1
    token_budget: int = 4096
    submit: float = MESSAGE
    collect: float = MESSAGE
    call: float = 0.0
    message: float = 0.0

    def decode(self, running: float, context: float) -> float:
        return self.generators.decode(running, context)  # type: ignore[arg-type]

    def prefill(self, tokens: int) -> float:
        return self.generators.prefill(tokens)

    def train(self, lengths: Sequence[int]) -> float:
        model, cut = self.learner, self.layout
        own = self.trains * model.train(lengths) + self.asks * model.forward(lengths, model.ranks)
        share = sum(lengths) / cut.shares
        bubble = (cut.learner_pipeline - 1) / max(1.0, share / self.token_budget)  # of 1F1B, per microbatch
        host = 16.0 * model.shape.parameters / model.ranks if cut.offload else 0.0
        return own * (1 + bubble) + self._exchange(share / cut.context_parallel) + host / HOST_LINK

    def _exchange(self, tokens: float) -> float:
        """Seconds of a step's exchanges of activations in bfloat16, by a rank with so many ``tokens``, in each of
        ``passes`` through its layers: two all-reduces of hidden states per layer with tensor parallelism (Megatron,
        1909.08053), q, k, v and o with Ulysses (2309.14509), keys and values round a ring with context parallelism."""
        shape, cut, link = self.learner.shape, self.layout, self.learner.cluster.link
        passes, layers = (4 if cut.checkpointing else 3), shape.layers / cut.learner_pipeline
        hidden, size, near = 2.0 * shape.hidden * tokens, cut.sequence_parallel, cut.learner_tensor
        heads = 4 * all_gather(link(size), size, hidden / size)
        sums = 2 * all_reduce(link(near), near, hidden)
        ring = cut.context_parallel * near  # ranks along tensor are neighbours
        turns, kv = cut.context_parallel - 1, shape.kv_bytes * tokens / (shape.layers * near)
        return passes * layers * (heads + sums + turns * (link(ring).latency + kv / link(ring).bandwidth))

    def score(self, kind: str, rollouts: int, tokens: int) -> float:
        if kind == "reward" or not self.layout.services:
            return MESSAGE
        device, fitted = self.generators.cluster.device, self.generators.fitted
        each = round(tokens / max(rollouts, 1))
        return MESSAGE + forward_flops(self.generators.shape, [each] * rollouts) / (device.flops * fitted.compute)

    @property
    def snapshot(self) -> float:
        return self.learner.snapshot

    @property
    def transfer(self) -> float:
        return self.generators.transfer

    @property
    def relayed(self) -> bool:
        return self.generators.relayed

    @property
    def load(self) -> float:
        return self.generators.load


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step and its parts, shares of idle time, and staleness in versions."""

    step: float
    train: float
    generation: float
    publish: float
    learner_idle: float
    held_back: float
    staleness: float


def costs_of(layout: Layout, subject: Subject) -> Any:
    """Costs in seconds for this layout (``cluster.cost_world.Costs``)."""
    if (fitted := subject.measured) is not None:
        base, token = fitted.train_terms
        return replace(fitted, train_terms=(base, token * subject.base.ranks / layout.ranks))
    model = CostModel(
        subject.shape, subject.clusters[layout.generators_on], layout.tensor, layout.pipeline, layout.ranks,
        layout.sharding, layout.checkpointing, layout.replicas, layout.parts,
        "collective" if layout.placement == "flatten" and subject.transport == "auto" else subject.transport,
    )  # fmt: skip
    learner, asks = replace(model, cluster=subject.clusters[layout.learner_on]), len(subject.kinds)
    trains = 1 + ("critic" in subject.kinds)
    return CatalogueCosts(model, learner, layout, 0 if layout.services else asks, trains, subject.token_budget)


def bytes_of(layout: Layout, subject: Subject) -> tuple[Bytes, Bytes]:
    """Bytes on (one device of a replica, one learner rank)."""
    shape, work = subject.shape, subject.workload
    held = layout.slots * (work.prompt + min(work.mean, work.kept))
    generator = generator_bytes(shape, held, layout.tensor, layout.pipeline, dtype=subject.dtype)
    learner = learner_bytes(
        shape, layout.sharding, layout.ranks, max(subject.token_budget, round(work.prompt) + work.longest),
        dtype=subject.dtype, checkpointing=layout.checkpointing, tensor=layout.learner_tensor,
        sequence_parallel=layout.sequence_parallel * layout.context_parallel, pipeline=layout.learner_pipeline,
        frozen=int("reference" in subject.kinds and not layout.services),
    )  # fmt: skip
    parts = dict(learner.parts)
    if "critic" in subject.kinds:
        ranks = layout.ranks // layout.parts
        parts["critic"] = layout_bytes(shape.parameters / layout.parts, layout.sharding, ranks, subject.dtype)
    if layout.offload:
        parts["weights and optimizer"] -= 12.0 * shape.parameters / layout.ranks  # master weights and moments
    return generator, Bytes(parts)


def refusal(layout: Layout, subject: Subject) -> str | None:
    """One sentence if the layout does not fit into the devices' memory, else None."""
    generator, learner = bytes_of(layout, subject)
    home = subject.clusters[layout.generators_on].device
    if subject.measured is not None:  # one machine: all parts share its memory
        parts = {f"{layout.replicas} generators": generator.total * layout.replicas}
        parts |= {f"learner's {name}": size * layout.ranks for name, size in learner.parts.items()}
        return Bytes(parts).refusal(home.memory, f"The run on {home.name}")
    if layout.placement == "flatten":
        own = {"learner's weights and optimizer": learner.parts["weights and optimizer"]}
        generator = Bytes({**generator.parts, **own})
    who = f"A replica's device (tensor_parallel_size={layout.tensor}, slots={layout.slots}) on {home.name}"
    return rank_refusal(layout, subject) or generator.refusal(home.memory, who)


def rank_refusal(layout: Layout, subject: Subject) -> str | None:
    """The same for one learner rank; with placement flatten a sleeping replica shares its device."""
    _, learner = bytes_of(layout, subject)
    school = subject.clusters[layout.learner_on].device
    parts = {**learner.parts, **({"sleeping generators": ASLEEP} if layout.placement == "flatten" else {})}
    stage = {"0": "whole", "fsdp2": "FSDP2"}.get(layout.sharding, f"ZeRO-{layout.sharding}")
    cut = {"tensor": layout.learner_tensor, "context": layout.context_parallel, "pipeline": layout.learner_pipeline}
    more = "".join(f", {name} parallel {size}" for name, size in cut.items() if size > 1)
    more += ", checkpointed" * layout.checkpointing + ", offloaded" * layout.offload
    return Bytes(parts).refusal(school.memory, f"A learner rank of {layout.ranks} ({stage}{more}) on {school.name}")


@dataclass(frozen=True)
class Steady:
    """Expected figures of a run in its steady state.

    Args:
        step: seconds per learner step.
        learner_idle: share of time that the learner waits.
        held_back: share of time that the generators wait for admission.
        staleness: mean over rollouts in versions, as an interval [low, high].
    """

    step: float
    learner_idle: float
    held_back: float
    staleness: tuple[float, float]


def steady(
    generation: float, training: float, batch: int, in_flight: float, bound: int, longest: float = 1.0
) -> Steady:
    """Steady state of generators and a learner that alone handle ``generation`` and ``training`` rollouts/s.

    Args:
        batch: rollouts per step.
        in_flight: sequences that all generators hold at once.
        bound: max_staleness.
        longest: expected longest response of a group divided by the mean (``Workload.longest_of``).

    By Little's law a rollout is in flight for ``in_flight / generation`` seconds; its group waits for the longest.
    """
    ratio = generation / training
    step = batch / min(generation, training)
    if ratio <= 1:
        natural = in_flight * longest / batch + ratio
        return Steady(step, 1 - ratio, 0.0, (min(natural, bound), min(natural, bound)))
    return Steady(step, 0.0, 1 - 1 / ratio, (max(0.0, bound - 0.5), float(bound)))


@lru_cache(maxsize=64)
def _longest(workload: Workload, siblings: int) -> float:
    return workload.longest_of(siblings)


def estimate(layout: Layout, subject: Subject, train: float | None = None) -> Estimate:
    """Estimate by the closed forms; ``train``: seconds of a step, if already known.

    A step takes at least the learner's time and the generators' time for a batch. As at most ``max_staleness + 1``
    batches are under way, it also takes at least 1 / (max_staleness + 1) of the time of one batch from admission to
    publish; with a bound of 0 this is all of it, including the longest response.
    """
    work, batch = subject.workload, layout.batch_size
    costs = costs_of(layout, subject)
    if train is None:
        train = costs.train([round(work.prompt + work.mean)] * batch)
    running, context = layout.in_flight / layout.replicas, work.prompt + min(work.mean / 2, work.kept)
    prefill = costs.prefill(round(work.prompt)) / subject.siblings
    rate = layout.replicas / (work.mean * costs.decode(running, context) / running + prefill)
    share = batch / layout.replicas  # rollouts of one batch per replica
    tail = _longest(work, batch if layout.max_staleness == 0 else subject.siblings)
    iterations = work.mean * (max(1.0, share / layout.slots) + tail - 1)
    alone = iterations * costs.decode(share * work.mean / iterations, context) + share * prefill
    alone += costs.submit + costs.collect
    stall = costs.snapshot / layout.publish_every
    publish = costs.snapshot + costs.transfer + costs.load
    generation = batch / rate + costs.load / layout.publish_every
    made = alone if layout.max_staleness == 0 else generation
    if layout.placement == "flatten":
        step = made + train + publish / layout.publish_every
    else:
        way = (alone + train + publish) / (layout.max_staleness + 1)
        step = max(train + stall, generation, way)
    settled = steady(
        rate, batch / train, batch, layout.in_flight, layout.max_staleness, _longest(work, subject.siblings)
    )
    idle, held_back = max(0.0, 1 - (train + stall) / step), max(0.0, 1 - generation / step)
    staleness = min(float(layout.max_staleness), sum(settled.staleness) / 2)
    return Estimate(step, train, made, publish, idle, held_back, staleness)
