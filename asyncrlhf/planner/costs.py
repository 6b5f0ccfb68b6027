"""Seconds of a run's operations from the shapes of model and machine: roofline terms with named coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrlhf.planner.shapes import Cluster, Link, ModelShape

RELAY_GAIN = 0.8  # a relay has to be faster than this share of a broadcast's time: its copies in host memory cost, too


@dataclass(frozen=True)
class Coefficients:
    """Fitted coefficients: the shares of a device's peak FLOP/s and memory bandwidth in use, the host's seconds per
    layer and per pipeline hop, and the share of compute time that can hide a sharded learner's communication."""

    compute: float = 0.4
    memory: float = 0.7
    layer: float = 4e-6
    hop: float = 2e-5
    overlap: float = 0.7

    def __post_init__(self) -> None:
        for name in ("compute", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"the utilisation {name}={getattr(self, name):g} is out of range; allowed: (0, 1].")
        if not 0 <= self.overlap <= 1 or self.layer < 0 or self.hop < 0:
            raise ValueError("overlap must lie in [0, 1], and layer and hop must not be negative.")


def forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """FLOPs of one causal pass over packed sequences: ``2 P N + 2 L h sum(len^2)``."""
    squares = sum(length * length for length in lengths)
    return 2.0 * shape.parameters * sum(lengths) + 2.0 * shape.layers * shape.hidden * squares


def train_flops(shape: ModelShape, lengths: Sequence[int], *, checkpointing: bool = False) -> float:
    """FLOPs of a forward and a backward pass; checkpointing repeats the forward pass."""
    return (4 if checkpointing else 3) * forward_flops(shape, lengths)


def all_reduce(link: Link, ranks: int, size: float) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def all_gather(link: Link, ranks: int, size: float) -> float:
    """Seconds until each rank holds all ``size`` bytes; the same for a reduce-scatter."""
    return (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def broadcast(link: Link, ranks: int, size: float) -> float:
    """Seconds to send ``size`` bytes along a pipelined tree; ``ranks`` includes the sender."""
    return math.ceil(math.log2(max(ranks, 1))) * link.latency + size / link.bandwidth if ranks > 1 else 0.0


def gloo_tree(link: Link, receivers: int, size: float) -> float:
    """Seconds of gloo's broadcast to ``receivers`` on machines of their own: the sender's link carries a copy to each
    child of a binomial tree's root. Where several share a link it takes longer."""
    return math.ceil(math.log2(receivers + 1)) * (link.latency + size / link.bandwidth)


def relay(link: Link, machines: int, size: float, piece: float = 2**20) -> float:
    """Seconds until a version is on all ``machines``, each of which passes it on in pieces (``transport=relay``)."""
    return link.latency + size / link.bandwidth + (machines - 1) * (link.latency + min(piece, size) / link.bandwidth)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a generator replica of ``tensor`` x ``pipeline`` devices, of a learner of ``ranks`` in ``layout``
    (memory.LEARNER's names) with ``parts`` ranks per copy of the layers, and of publishing between them by
    ``transport`` (``weights.transport``; auto: a relay where it is faster by more than its doubt)."""

    shape: ModelShape
    cluster: Cluster
    tensor: int = 1
    pipeline: int = 1
    ranks: int = 1
    layout: str = "0"
    checkpointing: bool = True
    replicas: int = 1
    parts: int = 1
    transport: str = "auto"
    fitted: Coefficients = field(default_factory=Coefficients)

    def decode(self, running: int, context: float) -> float:
        """Seconds of one iteration of a replica that advances ``running`` sequences of mean length ``context`` by a
        token each. The device works while the host launches; without CUDA graphs the launches, ``layer`` seconds each,
        take longer for small batches."""
        shape, device, fitted = self.shape, self.cluster.device, self.fitted
        each = max(1, math.ceil(running / self.pipeline))  # one microbatch per stage keeps all stages busy
        flops = 2.0 * shape.parameters * each + 4.0 * shape.layers * shape.hidden * each * context
        read = 2.0 * shape.parameters + each * context * shape.kv_bytes
        stage = max(flops / (device.flops * fitted.compute), read / (device.bandwidth * fitted.memory)) / self.tensor
        sums = 2 * shape.layers * all_reduce(self.cluster.link(self.tensor), self.tensor, 2.0 * each * shape.hidden)
        return max(shape.layers * fitted.layer, stage + sums) + (self.pipeline - 1) * fitted.hop

    def prefill(self, tokens: int) -> float:
        """Seconds that prompts of ``tokens`` tokens in all add to an iteration."""
        if not tokens:
            return 0.0
        speed = self.tensor * self.pipeline * self.cluster.device.flops * self.fitted.compute
        return forward_flops(self.shape, [tokens]) / speed

    def forward(self, lengths: Sequence[int], devices: int) -> float:
        """Seconds of a pass over sequences of these lengths, shared by ``devices``."""
        return forward_flops(self.shape, lengths) / (devices * self.cluster.device.flops * self.fitted.compute)

    def train(self, lengths: Sequence[int]) -> float:
        """Seconds of one step over sequences of these lengths in tokens."""
        speed = self.ranks * self.cluster.device.flops * self.fitted.compute
        compute = train_flops(self.shape, lengths, checkpointing=self.checkpointing) / speed
        return compute + max(0.0, self._communication() - self.fitted.overlap * compute)

    def _communication(self) -> float:
        """Seconds per step of collectives: gradients, and with sharded weights also the weights of each pass."""
        if (ranks := self.ranks // self.parts) == 1:
            return 0.0
        link, size = self.cluster.link(self.ranks), 2.0 * self.shape.parameters / self.parts
        return 3 * all_gather(link, ranks, size) if self.layout in ("3", "fsdp2") else all_reduce(link, ranks, 2 * size)

    @property
    def snapshot(self) -> float:
        """Seconds for which a publish blocks the learner: shards are gathered, whole weights are copied."""
        size = 2.0 * self.shape.parameters
        if self.layout in ("3", "fsdp2") or self.parts > 1:
            return all_gather(self.cluster.link(self.ranks), self.ranks, size)
        return 2 * size / (self.cluster.device.bandwidth * self.fitted.memory)

    @property
    def transfer(self) -> float:
        """Seconds to send the weights to all replicas, concurrently with the next step."""
        return self._transfers["relay" if self.relayed else "collective"]

    @property
    def relayed(self) -> bool:
        """Whether a relay sends the weights."""
        by = self._transfers
        return self.transport == "relay" or (self.transport == "auto" and by["relay"] < RELAY_GAIN * by["collective"])

    @property
    def _transfers(self) -> dict[str, float]:
        """One broadcast serves all replicas of one worker; each of the others has a group of its workers, and they are
        sent to one after the other. A relay goes by way of host memory, also within a machine."""
        size, workers = 2.0 * self.shape.parameters, self.tensor * self.pipeline
        receivers = self.replicas * workers
        link = self.cluster.inter if 1 + receivers > self.cluster.per_node else self.cluster.intra
        groups, members = (self.replicas, workers) if workers > 1 else (1, self.replicas)
        machines = math.ceil(receivers / self.cluster.per_node)
        return {
            "collective": groups * broadcast(link, 1 + members, size),
            "relay": relay(self.cluster.inter, machines, size),
        }

    @property
    def load(self) -> float:
        """Seconds for which a replica pauses between two tokens to load the weights."""
        shards = self.tensor * self.pipeline
        return 4.0 * self.shape.parameters / (shards * self.cluster.device.bandwidth * self.fitted.memory)
