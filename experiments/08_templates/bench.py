"""Compares the field's macro templates on equal devices, simulated with the real controller.

Costs come from the planner's formulas and a catalogue of devices; the policy and the reward model have one size.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.costs import Coefficients, CostModel, forward_flops
from asyncrlhf.planner.memory import USABLE, Bytes, generator_bytes, learner_bytes
from asyncrlhf.planner.shapes import Cluster, ModelShape, Workload, catalogue, cluster_of
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.simulator.cost_world import Conditions
from asyncrlhf.simulator.simulate import OVERRIDES, figures, simulate
from asyncrlhf.validation import typed_path

MODELS = {
    "llama-3-8b": ModelShape(32, 4096, 14336, 128256, 32, 8, 128),
    "llama-3-70b": ModelShape(80, 8192, 28672, 128256, 64, 8, 128),
    "qwen-2.5-1.5b": ModelShape(28, 1536, 8960, 151936, 12, 2, 128, tied=True, bias=True),
}
MICROBATCH = 8192  # tokens of the learner's microbatch
MOST_SLOTS = 256  # sequences of one replica
SIMULATED = 256  # rollouts of a simulated batch
HANDLES = 16  # simulated replicas, each of which stands for a cohort of equal ones
FIGURES = ("step_seconds", "rollouts_per_device_hour", "idle", "staleness", "dropped", "learner_gb", "generator_gb")


EXPECT = "from data-sheet peaks, not measured here: expect errors of 30%"


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


def slots_that_fit(shape: ModelShape, memory: float, context: float, tensor: int) -> int:
    """Number of sequences of ``context`` tokens that fit a replica on devices of ``memory`` bytes."""
    room = USABLE * memory * tensor - 2.0 * shape.parameters
    return max(0, int(room // (context * shape.kv_bytes)))


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


def run(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Every template on each of ``--devices``. Raises ConfigError for a model, devices or a batch that do not fit."""
    parser = argparse.ArgumentParser(prog="asyncrlhf bench templates", description=__doc__)
    parser.add_argument("--device", default="H100", help=f"device of the catalogue: {', '.join(catalogue())}")
    parser.add_argument("--devices", default="8", help="numbers of devices, separated by commas")
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--response", type=float, default=1024, help="mean tokens of a response, log-normal")
    parser.add_argument("--cv", type=float, default=0.6, help="coefficient of variation of these lengths")
    parser.add_argument("--longest", type=int, default=4096, help="longest response in tokens")
    parser.add_argument("--batch", type=int, help="rollouts per step (default: 32 per device, at most 16,384)")
    parser.add_argument("--steps", type=int, default=8, help="steps to simulate, and 2 more for each version of lag")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=typed_path, help="CSV file to write")
    options = parser.parse_args(list(arguments))
    try:
        scenes = [_scene(options, int(word)) for word in options.devices.split(",")]
    except ValueError as error:
        raise ConfigError(f"--devices {options.devices}: {error}") from error
    rows: list[dict[str, Any]] = []
    for scene in scenes:
        own = [_row(scene, template, options) for template in TEMPLATES]
        _show(scene, own)
        rows += [{"model": options.model, "device": options.device, **row} for row in own]
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    print(f"Staleness is predicted, quality is not. Figures are {EXPECT}.")
    return rows


def _scene(options: argparse.Namespace, devices: int) -> Scene:
    lengths = Workload(options.prompt, options.response, options.cv, options.longest)
    batch = options.batch or min(32 * devices, 16384)
    if batch % 8:
        raise ValueError(f"--batch {batch} are no whole groups of 8.")
    return Scene(MODELS[options.model], cluster_of(options.device, devices), lengths, batch)


def _row(scene: Scene, template: Template, options: argparse.Namespace) -> dict[str, Any]:
    """One template's figures; missing if it does not fit."""
    empty = dict.fromkeys(FIGURES, float("nan"))
    row: dict[str, Any] = {"devices": scene.cluster.devices, "batch": scene.batch, "template": template.name}
    try:
        split = scene.split(template)
    except ValueError as error:
        return {**row, "generating": 0, "scoring": 0, "training": 0, **empty, "note": str(error)}
    shares = {"generating": split.generating, "scoring": split.reward, "training": split.ranks}
    held = {f"{side}_gb": round(size / 1e9, 1) for side, size in scene.memory(split).items()}
    found = _simulated(scene, template, split, options)
    return {**row, **shares, **{name: {**found, **held}[name] for name in FIGURES}, "note": ""}


def _simulated(scene: Scene, template: Template, split: Split, options: argparse.Namespace) -> dict[str, float]:
    workers, batch = min(HANDLES // 2, split.reward), scene.batch // scene.thin
    costs = TemplateCosts(scene, split, template.chunk, workers, scene.thin)
    config = load_config(
        [
            *OVERRIDES,
            *template.overrides,
            f"steps={options.steps + 2 * template.lag}",
            f"batch_size={batch}",
            f"num_generations={scene.group}",
            f"generator.replicas={split.handles}",
            f"generator.slots={max(1, round(scene.slots(split) * split.cohort / scene.thin))}",
            f"generator.max_completion_length={scene.lengths.longest}",
            f"reward.workers={workers}",
            f"fusion.max_batch={math.ceil(batch / workers)}",
            f"seed={options.seed}",
            "logging.progress=none",
            "logging.report=false",
            "stall_timeout_seconds=1000000",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        summary = simulate(config, costs, scene.lengths, run, Conditions(cohort=split.cohort))
        found = figures(read_metrics(run / METRICS_FILE), config.async_.bound, warm_up=options.steps // 3)
    return _as_row(scene, split, found, summary)


def _as_row(scene: Scene, split: Split, found: Mapping[str, float], summary: Mapping[str, Any]) -> dict[str, float]:
    devices, step = scene.cluster.devices, found["step_seconds"]
    scored = min(1.0, scene.stages(split)[1] / step)
    busy = (
        (1 - found["generator_idle"]) * split.generating
        + (1 - found["learner_idle"]) * split.ranks
        + scored * split.reward
    )
    return {
        "step_seconds": round(step, 3),
        "rollouts_per_device_hour": round(3600 * scene.batch / step / devices, 1),
        "idle": round(max(0.0, 1 - busy / devices), 3),
        "staleness": round(found["staleness"], 2),
        "dropped": round(found["dropped_share"], 4),
    }


def _show(scene: Scene, rows: Sequence[Mapping[str, Any]]) -> None:
    first = rows[0]["step_seconds"]
    table = Table(title=f"{scene.cluster.devices} {scene.cluster.device.name}, {scene.batch} rollouts per step")
    for name in (
        "template",
        "generate / score / train",
        "s a step",
        "speed",
        "idle",
        "staleness",
        "GB, learner / generator",
    ):
        table.add_column(name, justify="left" if name == "template" else "right")
    for row in rows:
        if row["note"]:
            table.add_row(row["template"], "", row["note"])
            continue
        table.add_row(
            row["template"],
            f"{row['generating']} / {row['scoring']} / {row['training']}",
            f"{row['step_seconds']:.2f}",
            f"{first / row['step_seconds']:.2f}",
            f"{row['idle']:.2f}",
            f"{row['staleness']:.2f}",
            f"{row['learner_gb']:.0f} / {row['generator_gb']:.0f}",
        )
    Console().print(table)
