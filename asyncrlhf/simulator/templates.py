"""The field's macro templates on equal devices: each one's split, the costs of its parts, the memory of a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from asyncrlhf.planner.costs import Coefficients, CostModel, forward_flops
from asyncrlhf.planner.memory import USABLE, Bytes, generator_bytes, learner_bytes, slots_that_fit
from asyncrlhf.planner.shapes import Cluster, ModelShape, Workload

MODELS = {
    "llama-3-8b": ModelShape(32, 4096, 14336, 128256, 32, 8, 128),
    "llama-3-70b": ModelShape(80, 8192, 28672, 128256, 64, 8, 128),
    "llama-2-7b": ModelShape(32, 4096, 11008, 32000, 32, 32, 128),
    "qwen-2.5-1.5b": ModelShape(28, 1536, 8960, 151936, 12, 2, 128, tied=True, bias=True),
}
MICROBATCH = 8192  # tokens of the learner's microbatch
MOST_SLOTS = 256  # sequences of one replica
SIMULATED = 256  # rollouts of a simulated batch
HANDLES = 16  # simulated replicas, each of which stands for a cohort of equal ones


@dataclass(frozen=True)
class Template:
    """``overrides``: of its simulated run. ``turns``: all parts take turns on all devices. ``chunk``: tokens after
    which the reward model reads the next part of a sequence that is being sampled; 0: it reads finished ones."""

    name: str
    overrides: tuple[str, ...]
    turns: bool = False
    chunk: int = 0

    lag: int = 0

    @property
    def serial(self) -> bool:
        """Whether a step's stages come one after another."""
        return self.lag == 0


TEMPLATES = (
    Template("sync, colocated", ("async=sync", "fusion=batch"), turns=True),
    Template("sync, disaggregated", ("async=sync", "fusion=batch")),
    Template("sync, fused chunks", ("async=sync", "fusion=rollout"), chunk=256),
    Template("one-step", ("async=one_step", "fusion=rollout"), lag=1),
    *(
        Template(f"async, lag {lag}", ("async=async", f"async.max_staleness={lag}", "fusion=rollout"), lag=lag)
        for lag in (1, 2, 4, 8)
    ),
)


@dataclass(frozen=True)
class Split:
    """Devices of each part; with turns each part has all. ``tensor``: devices of a replica; ``batches``: the number of
    batches under way that the gate allows."""

    replicas: int
    tensor: int
    reward: int
    ranks: int
    turns: bool = False
    batches: int = 1

    @property
    def generating(self) -> int:
        return self.replicas * self.tensor

    @property
    def handles(self) -> int:
        """Simulated replicas."""
        return min(HANDLES, self.replicas)

    @property
    def cohort(self) -> float:
        """How many replicas a simulated one stands for."""
        return self.replicas / self.handles


@dataclass(frozen=True)
class Scene:
    """A policy, a reward model of its size, devices, lengths, and ``batch`` rollouts a step in groups."""

    shape: ModelShape
    cluster: Cluster
    lengths: Workload
    batch: int
    group: int = 8
    fitted: Coefficients = field(default_factory=Coefficients)

    @property
    def thin(self) -> int:
        """How many rollouts one simulated stands for, so that a simulated batch has about SIMULATED of them."""
        groups = self.batch // self.group
        most = max(1, self.batch // SIMULATED)
        return next(thin for thin in range(most, 0, -1) if groups % thin == 0)

    @cached_property
    def tensor(self) -> int:
        """The fewest devices of a node whose memory holds the weights and two full sequences a device."""
        for tensor in (t for t in (1, 2, 4, 8, 16) if t <= self.cluster.per_node):
            if slots_that_fit(self.shape, self.cluster.device.memory, self.context, tensor) >= 8 * tensor:
                return tensor
        raise ValueError(
            f"no replica inside a node of {self.cluster.per_node} {self.cluster.device.name} holds the model."
        )

    @property
    def context(self) -> float:
        return self.lengths.prompt + self.lengths.longest

    def costs(self, split: Split) -> CostModel:
        return CostModel(
            self.shape,
            self.cluster,
            tensor=split.tensor,
            ranks=split.ranks,
            layout="fsdp2" if split.ranks > 1 else "0",
            replicas=split.replicas,
            fitted=self.fitted,
        )

    def slots(self, split: Split) -> int:
        """Sequences of a replica: its share of those allowed under way, limited by its memory and by MOST_SLOTS."""
        taken = self.learner(split).parts["weights and optimizer"] if split.turns else 0.0
        fit = slots_that_fit(self.shape, self.cluster.device.memory - taken / USABLE, self.context, split.tensor)
        return min(MOST_SLOTS, fit, math.ceil(self.batch * split.batches / split.replicas))

    def learner(self, split: Split) -> Bytes:
        layout = "fsdp2" if split.ranks > 1 else "0"
        return learner_bytes(self.shape, layout, split.ranks, max(MICROBATCH, int(self.context)))

    def memory(self, split: Split) -> dict[str, float]:
        """Bytes of one device, by side; with turns the generators' side holds the learner's weights, too."""
        learner, held = self.learner(split), self.slots(split) * (self.lengths.prompt + self.lengths.mean)
        generator = generator_bytes(self.shape, held, split.tensor).total
        if split.turns:
            both = max(learner.total, learner.parts["weights and optimizer"] + generator)
            return {"learner": both, "generator": both}
        return {"learner": learner.total, "generator": generator}

    def stages(self, split: Split) -> tuple[float, float, float]:
        """Seconds of one batch alone in generation, in reward and in training. Generation has all slots full; with one
        batch under way the longest sequence of its last wave is added."""
        costs, slots = self.costs(split), self.slots(split)
        if slots < 1:
            return math.inf, math.inf, math.inf
        token = costs.decode(slots, self.lengths.prompt + self.lengths.mean / 2)
        wave = slots * split.replicas
        tokens = self.batch * self.lengths.mean / wave
        if split.batches == 1:
            tokens += (self.lengths.longest_of(min(wave, self.batch)) - 1) * self.lengths.mean
        lengths = [round(self.lengths.prompt + self.lengths.mean)] * self.batch
        return tokens * token, costs.forward(lengths, split.reward), costs.train(lengths)

    def split(self, template: Template) -> Split:
        """The devices of each part: all of them if parts take turns, else the fitting split into sixteenths with the
        fastest slowest part (serial: the smallest sum). Raises ValueError if none fits."""
        devices = self.cluster.devices
        if template.turns:
            chosen = [Split(devices // self.tensor, self.tensor, devices, devices, turns=True)]
        else:
            chosen = [replace(split, batches=template.lag + 1) for split in self.splits()]

        def seconds(split: Split) -> float:
            generation, reward, training = self.stages(split)
            return generation + reward + training if template.serial else max(generation, reward, training)

        fitting = [s for s in chosen if self.learner(s).refusal(self.cluster.device.memory, "") is None]
        fitting = [s for s in fitting if self.slots(s) >= 1]
        if not fitting:
            raise ValueError(f"{template.name}: {devices} {self.cluster.device.name} do not hold the learner.")
        return min(fitting, key=seconds)

    def splits(self) -> Iterator[Split]:
        """All splits into sixteenths of the devices; devices that do not fill a replica go to the learner."""
        devices, tensor = self.cluster.devices, self.tensor
        parts = min(16, devices)
        for learner in range(1, parts - 1):
            for reward in range(1, parts - learner):
                scoring = reward * devices // parts
                replicas = (devices - learner * devices // parts - scoring) // tensor
                ranks = devices - replicas * tensor - scoring
                if replicas and scoring * self.cluster.device.memory * USABLE > 2 * self.shape.parameters:
                    yield Split(replicas, tensor, scoring, ranks)


@dataclass(frozen=True)
class TemplateCosts:
    """Seconds of a simulated run (``cluster.cost_world.Costs``): one replica stands for ``cohort``, one reward worker
    for an equal share of the reward's devices, one rollout for ``thin`` of its length. Prompts have the scene's length,
    not that of the run's own."""

    scene: Scene
    split: Split
    chunk: int
    workers: int
    thin: int = 1
    submit: float = 0.002
    collect: float = 0.002
    call: float = 0.0
    message: float = 0.0

    @cached_property
    def model(self) -> CostModel:
        return self.scene.costs(self.split)

    @cached_property
    def _keeps_up(self) -> bool:
        generation, reward, _ = self.scene.stages(self.split)
        return reward < generation

    @property
    def snapshot(self) -> float:
        return self.model.snapshot

    @property
    def transfer(self) -> float:
        return self.model.transfer

    @property
    def load(self) -> float:
        return self.model.load

    def decode(self, running: float, context: float) -> float:
        return self.model.decode(max(1, round(running * self.thin)), context + self.scene.lengths.prompt)

    def prefill(self, tokens: int) -> float:
        """Of one group's prompt; a cohort's replicas prefill side by side."""
        return self.model.prefill(round(self.scene.lengths.prompt)) * self.thin / self.split.cohort

    def train(self, lengths: Sequence[int]) -> float:
        return self.model.train([round(length + self.scene.lengths.prompt) for length in lengths] * self.thin)

    def score(self, kind: str, rollouts: int, tokens: int) -> float:
        """Of a call. With chunks a device has by then read all but half a chunk of each sequence if the devices keep up
        with sampling: the most that chunks can hide."""
        length = self.scene.lengths.prompt + tokens / rollouts
        if self.chunk and self._keeps_up:
            length = min(length, self.chunk / 2)
        devices = max(1.0, self.split.reward / self.workers)
        device = self.scene.cluster.device
        alone = forward_flops(self.scene.shape, [round(length)]) / (device.flops * self.scene.fitted.compute)
        return alone * max(1.0, rollouts * self.thin / devices)
