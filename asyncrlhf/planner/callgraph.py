"""Calls on meshes: one PPO iteration as ReaL (2406.14088), HybridFlow and Pipe-RLHF plan it. For what-if studies only:
`train` cannot run these plans, which move a model between the meshes of its calls."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from asyncrlhf.planner.costs import Coefficients, CostModel, all_reduce, forward_flops, reshard
from asyncrlhf.planner.memory import TEXTBOOK, USABLE
from asyncrlhf.planner.shapes import Cluster, ModelShape

ITERATIONS = 5  # chained; the cost of a plan is their makespan divided by ITERATIONS
Kind = Literal["generate", "infer", "train"]


@dataclass(frozen=True)
class Call:
    """``after``: the calls of the same batch whose results this call reads."""

    name: str
    model: str
    kind: Kind
    after: tuple[str, ...] = ()


SCORED = ("reward", "reference", "critic")
PPO = (
    Call("generation", "actor", "generate"),
    *(Call(model, model, "infer", ("generation",)) for model in SCORED),
    Call("actor training", "actor", "train", SCORED),
    Call("critic training", "critic", "train", SCORED),
)


@dataclass(frozen=True)
class Layout:
    """Devices ``first`` to ``first + devices - 1``, as ``pipeline`` x ``tensor`` x ``data``."""

    first: int
    devices: int
    pipeline: int
    tensor: int

    @property
    def data(self) -> int:
        return self.devices // (self.pipeline * self.tensor)

    @property
    def mesh(self) -> slice:
        return slice(self.first, self.first + self.devices)


Plan = tuple[Layout, ...]  # one layout per call, in the graph's order


@dataclass(frozen=True)
class Graph:
    """Calls, their models, and a batch of ``batch`` prompts (``prompt`` tokens) with responses (``response`` tokens).

    Args:
        delay: number of batches by which generation and inference run ahead of training's weights (Pipe-RLHF's
            delayed pipeline: 1).
        recompute: training repeats the forward pass (gradient checkpointing).
        minibatches: updates per iteration, one after the other; ReaL's example of PPO has 4.
    """

    shapes: Mapping[str, ModelShape]
    cluster: Cluster
    prompt: int
    response: int
    batch: int
    calls: tuple[Call, ...] = PPO
    delay: int = 0
    recompute: bool = True
    minibatches: int = 4
    fitted: Coefficients = field(default_factory=Coefficients)

    def seconds(self, call: Call, layout: Layout) -> float:
        """Seconds of one call, by ReaL's terms: 2p micro-batches in training and inference, p in generation."""
        shape, fitted, cluster = self.shapes[call.model], self.fitted, self.cluster
        p, t, d = layout.pipeline, layout.tensor, layout.data
        each = self.batch / d
        model = CostModel(shape, cluster, tensor=t, pipeline=p, fitted=fitted)
        if call.kind == "generate":
            contexts = self.prompt + self.response * (np.arange(4) + 0.5) / 4  # the context grows
            token = float(np.mean([model.decode(math.ceil(each), context) for context in contexts]))
            return self._stage(shape, layout, self.prompt, p) * (2 * p - 1) + token * (self.response - 1)
        m, length = 2 * p, self.prompt + self.response
        if call.kind == "infer":
            return self._stage(shape, layout, length, m) * (p + m - 1)
        passes = (4, 3) if self.recompute else (3, 2)
        stage = self._stage(shape, layout, length, m * self.minibatches, *passes)
        weights = 2.0 * shape.parameters / (p * t)
        link = cluster.link(layout.devices)
        sync = 2 * all_reduce(link, d, weights)
        update = 16.0 * shape.parameters / (layout.devices * cluster.device.bandwidth * fitted.memory)
        return self.minibatches * (stage * (p + m - 1) + sync + update)

    def _stage(
        self, shape: ModelShape, layout: Layout, length: int, microbatches: int, work: int = 1, talk: int = 1
    ) -> float:
        """Seconds of one micro-batch in one stage: ``work`` times the compute of a forward pass plus ``talk`` times
        its all-reduces over the tensor-parallel ranks, or the host's launches if they take longer."""
        rows, shards = self.batch / layout.data / microbatches, layout.pipeline * layout.tensor
        flops = rows * forward_flops(shape, [length])
        compute = flops / (shards * self.cluster.device.flops * self.fitted.compute)
        size = 2.0 * rows * length * shape.hidden
        sums = 2 * all_reduce(self.cluster.link(layout.tensor), layout.tensor, size)
        hop = size / layout.tensor / self.cluster.inter.bandwidth + self.fitted.hop if layout.pipeline > 1 else 0.0
        layers = shape.layers / layout.pipeline
        return max(work * compute + talk * (layers * sums + hop), work * layers * self.fitted.layer)

    def reallocation(self, model: str, source: Layout, target: Layout) -> float:
        """Seconds to move the model's weights from the layout ``source`` to the layout ``target``."""
        if source == target:
            return 0.0
        size = 2.0 * self.shapes[model].parameters
        share = 1 / (target.pipeline * target.tensor)
        same = source.mesh == target.mesh
        if same and source.pipeline % target.pipeline == 0 and source.tensor % target.tensor == 0:
            found = reshard("hybridflow", source.pipeline, source.tensor, source.data, target.pipeline, target.tensor)
            share = float(found.received)
        covered = {source.first // self.cluster.per_node, (source.first + source.devices - 1) // self.cluster.per_node}
        covered |= {target.first // self.cluster.per_node, (target.first + target.devices - 1) // self.cluster.per_node}
        link = self.cluster.intra if len(covered) == 1 else self.cluster.inter
        return link.latency + share * size / link.bandwidth

    def held(self, plan: Plan) -> np.ndarray:
        """[devices] bytes: trained models in mixed precision with sharded optimizers, frozen models, and the largest
        temporary need of any one call (weights in another layout, key-value cache, activations)."""
        always, most = np.zeros(self.cluster.devices), np.zeros(self.cluster.devices)
        trained = {call.model: layout for call, layout in zip(self.calls, plan, strict=True) if call.kind == "train"}
        whole, shared = TEXTBOOK["1"]
        for call, layout in zip(self.calls, plan, strict=True):
            shape, shards = self.shapes[call.model], layout.pipeline * layout.tensor
            own = 0.0
            if call.kind == "train":
                always[layout.mesh] += shape.parameters * (whole + shared / layout.data) / shards
            elif call.model not in trained:
                always[layout.mesh] += 2.0 * shape.parameters / shards
            elif trained[call.model] != layout:
                own += 2.0 * shape.parameters / shards
            tokens = self.batch / layout.data * (self.prompt + self.response)
            if call.kind == "generate":
                own += tokens * shape.kv_bytes / shards
            elif call.kind == "train":
                own += tokens / (2 * layout.pipeline) * shape.hidden * (2.0 * shape.layers / layout.tensor + 34)
            most[layout.mesh] = np.maximum(most[layout.mesh], own)
        return always + most

    def makespan(self, plan: Plan, iterations: int = ITERATIONS) -> float:
        """Seconds until the last of ``iterations`` chained iterations ends. A call starts when its parents have ended
        and all devices of its mesh are free; among several such calls the one with the earliest start goes first."""
        return max(end for _, _, _, end in self.timeline(plan, iterations))

    def timeline(self, plan: Plan, iterations: int = ITERATIONS) -> list[tuple[str, int, float, float]]:
        """(call, batch, start, end) of each call and reallocation, ordered by start."""
        layouts = {call.name: layout for call, layout in zip(self.calls, plan, strict=True)}
        trains = {call.model: call for call in self.calls if call.kind == "train"}
        seconds = {call.name: self.seconds(call, layouts[call.name]) for call in self.calls}
        free, ended = np.zeros(self.cluster.devices), dict[tuple[str, int], float]()
        waiting = [(batch, order) for batch in range(iterations) for order in range(len(self.calls))]
        done: list[tuple[str, int, float, float]] = []

        def ready(batch: int, call: Call) -> float | None:
            parents = [(name, batch) for name in call.after]
            if (train := trains.get(call.model)) is not None:
                parents.append((train.name, batch - 1 - (0 if call.kind == "train" else self.delay)))
            times = [ended.get(parent) if parent[1] >= 0 else 0.0 for parent in parents]
            return None if None in times else max((time for time in times if time is not None), default=0.0)

        while waiting:
            possible = []
            for batch, order in waiting:
                call = self.calls[order]
                since = ready(batch, call)
                if since is not None:
                    possible.append((max(since, float(free[layouts[call.name].mesh].max())), batch, order))
            start, batch, order = min(possible)
            waiting.remove((batch, order))
            call, layout = self.calls[order], layouts[self.calls[order].name]
            train = trains.get(call.model)
            if train is not None and call.kind != "train" and batch > self.delay:
                source = layouts[train.name]
                moved = self.reallocation(call.model, source, layout)
                if moved:  # both meshes take part
                    start = max(start, float(free[source.mesh].max()))
                    done.append((f"{call.model} to {call.name}", batch, start, start + moved))
                    free[source.mesh] = start = start + moved
            end = start + seconds[call.name]
            done.append((call.name, batch, start, end))
            ended[call.name, batch] = free[layout.mesh] = end
        return sorted(done, key=lambda row: row[2])

    def cost(self, plan: Plan) -> float:
        """Seconds per iteration; infinite if the plan exceeds the memory of a device."""
        if self.held(plan).max() > USABLE * self.cluster.device.memory:
            return math.inf
        return self.makespan(plan) / ITERATIONS


Mesh = tuple[int, int]  # (first device, devices)


def meshes(cluster: Cluster) -> list[Mesh]:
    """Meshes of consecutive whole nodes, and of halves, quarters, ... of one node."""
    node, runs = cluster.per_node, range(1, cluster.nodes + 1)
    found = [(first * node, count * node) for count in runs for first in range(cluster.nodes - count + 1)]
    part = node // 2
    while part:
        found += [(first, part) for first in range(0, cluster.devices, part)]
        part //= 2
    return found


def layouts(graph: Graph, call: Call, mesh: Mesh) -> list[Layout]:
    """All layouts of a call on a mesh: tensor parallelism is a power of two inside a node and divides the key-value
    heads, pipeline stages divide the layers, and there are at most as many data-parallel copies as prompts."""
    shape, (first, devices) = graph.shapes[call.model], mesh
    widths = [t for t in (1, 2, 4, 8, 16) if t <= graph.cluster.per_node and shape.kv_heads % t == 0]
    found = [
        Layout(first, devices, p, t)
        for t in widths
        for p in range(1, devices // t + 1)
        if devices % (p * t) == 0 and shape.layers % p == 0
    ]
    return [layout for layout in found if layout.data <= graph.batch]


PLACEMENTS = ("flatten", "interleave", "separate", "any")


def placed(graph: Graph, placement: str) -> list[list[Mesh]]:
    """The meshes allowed for each call: ``flatten``, one mesh of all devices; ``interleave``, reference and reward on
    one half each; ``separate``, generation on one half and all else on the other; ``any``, all meshes."""
    everything, half = (0, graph.cluster.devices), graph.cluster.devices // 2
    first, second = (0, half), (half, graph.cluster.devices - half)
    if placement == "any":
        return [meshes(graph.cluster)] * len(graph.calls)
    if placement == "interleave":
        halves = {"reference": first, "reward": second}
        return [[halves.get(call.name, everything)] for call in graph.calls]
    if placement == "separate":
        return [[first if call.kind == "generate" else second] for call in graph.calls]
    return [[everything]] * len(graph.calls)


class Space:
    """Plans for search.py. A walk starts with the fastest layout of each call; a step changes one call's layout."""

    def __init__(self, graph: Graph, allowed: Sequence[Sequence[Mesh]]) -> None:
        self.graph = graph
        self.options = [
            sorted(
                (layout for mesh in given for layout in layouts(graph, call, mesh)),
                key=lambda layout: graph.seconds(call, layout),
            )
            for call, given in zip(graph.calls, allowed, strict=True)
        ]

    def start(self) -> Plan:
        return tuple(options[0] for options in self.options)

    def neighbour(self, state: Plan, rng: random.Random) -> Plan:
        chosen = rng.randrange(len(state))
        return (*state[:chosen], rng.choice(self.options[chosen]), *state[chosen + 1 :])

    def cost(self, state: Plan) -> float:
        return self.graph.cost(state)
