"""A plan: the best layout for given devices, chosen among simulated runs."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from asyncrlhf.config.compose import compose_config
from asyncrlhf.config.run_config import KEEPS_MEMORY, RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import named
from asyncrlhf.planner.choose import FINALISTS, SEEDS, Chosen, Space, choose
from asyncrlhf.planner.explain import seconds_in_words, sentences
from asyncrlhf.planner.layout import Layout, counts, keeps, overrides
from asyncrlhf.planner.ranking import Subject, costs_of
from asyncrlhf.planner.shapes import Cluster, Device, Link, ModelShape, Workload, catalogue, nodes_for
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.simulator.cost_world import Conditions
from asyncrlhf.simulator.given import changed, given, settings_of_run, sharing
from asyncrlhf.simulator.plan_files import write_plan
from asyncrlhf.simulator.simulate import OVERRIDES, figures, in_cohorts, simulate
from asyncrlhf.validation import check

MEASURED_STEPS = 12  # of a simulated run, without its beginning and its end
SAY_EVERY = 5.0  # seconds between two lines about the progress
HANDLES = 16  # least number of simulated replicas; each may represent several
BOUNDS, PUBLISHES = (0, 1, 2, 4, 8, 16), (1, 2, 4)
SLOTS = (32, 64, 128, 256, 512)
# Overrides of the user that fix a field of the layout.
DECIDES = {
    "cluster": "placement", "cluster.placement": "placement", "generator.replicas": "replicas",
    "generator.vllm.tensor_parallel_size": "tensor", "generator.vllm.pipeline_parallel_size": "pipeline",
    "generator.slots": "slots", "learner.ranks": "ranks", "learner": "sharding", "learner.zero_stage": "sharding",
    "learner.sharding": "sharding", "learner.sequence_parallel_size": "sequence_parallel",
    "learner.tensor_parallel_size": "learner_tensor", "learner.context_parallel_size": "context_parallel",
    "learner.pipeline_parallel_size": "learner_pipeline", "learner.zero_offload": "offload",
    "learner.gradient_checkpointing": "checkpointing", "async": "max_staleness",
    "async.mode": "max_staleness", "async.max_staleness": "max_staleness", "weights.publish_every": "publish_every",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """The planning task: fixed settings, the space of layouts, and their costs."""

    settings: DictConfig
    subject: Subject
    space: Space
    gpus: bool
    hiccups: tuple[float, float] = (0.0, 0.0)
    source: str = ""
    interference: tuple[float, float] = (1.0, 1.0)
    cores: int = 1

    def overrides(self, layout: Layout) -> list[str]:
        said = [*overrides(layout, gpus=self.gpus, kinds=self.subject.kinds), *node_labels(layout, self.subject)]
        relayed = self.subject.measured is None and costs_of(layout, self.subject).relayed
        return [*said, "weights.transport=relay"] if relayed else said


def task_of(
    words: Sequence[str],
    folder: Path | None,
    *,
    run: Path | None = None,
    profile: Path | None = None,
    groups: Sequence[tuple[str, int]] = (),
    per_node: int = 0,
    cores: int = 1,
    law: Workload | None = None,
    keep: Sequence[str] = (),
    free_batch: bool = False,
) -> Task:
    """The task of a run with the overrides ``words``; raises ConfigError with one sentence for invalid input.

    Args:
        folder: of the user's own config files.
        run, profile: where the costs of this machine with its ``cores`` come from.
        groups: else the (name, number) of catalogue devices, ``per_node`` in a node (0: the catalogue's number).
        law: lengths in place of the recorded ones.
        keep: conditions on layouts; ``free_batch``: the plan may change the batch size.
    """
    settings = settings_of_run(run, words) if run is not None else compose_config(words, folder)
    config = changed(settings)
    known = given(run, profile, config, law)
    try:
        clusters = tuple(nodes_for(name, count, per_node) for name, count in groups) or (this_machine(cores),)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if known.lengths is None:
        raise ConfigError(
            "plan: no response lengths are known; give --mean-length TOKENS (and --cv, --prompt-length), or --from RUN."
        )
    smaller, longest = config.generator.kept, config.generator.max_completion_length
    lengths = known.lengths if smaller is None else replace(known.lengths, kept=smaller.budget(longest))
    subject = Subject(
        shape_of(config),
        lengths,
        config.num_generations,
        clusters,
        layout_of(config, known.costs is not None),
        known.costs,
        tuple(kind for kind in ("reference", "critic") if getattr(config.algorithm, f"needs_{kind}")),
        config.learner.token_budget,
        "float32" if known.costs is not None and config.learner.mixed_precision == "none" else "bfloat16",
        config.weights.transport,
    )
    # On this machine every part takes as many cores as it has threads.
    devices = [count for _, count in groups] or [cores // max(config.generator.threads, config.learner.threads, 1)]
    kept = {DECIDES.get(word.partition("=")[0].lstrip("+~")) for word in words}
    space = space_of(subject, devices, config, kept, keep, free_batch)
    source = str(run or profile or ",".join(name for name, _ in groups))
    return Task(settings, subject, space, known.costs is None, known.hiccups, source, known.interference, cores)


def this_machine(cores: int) -> Cluster:
    """Its cores as one group of devices."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    here = Device("this machine", 1.0, 1.0, memory, "measured")
    return Cluster(here, 1, cores, Link(0.0, 1.0), Link(0.0, 1.0))


def shape_of(config: RunConfig) -> ModelShape:
    path = Path(named(config.model.path))
    check(
        path.is_dir(),
        f"plan: model.path={config.model.path} is not a folder here; give one that holds the model's config.json "
        "(its weights are not needed).",
    )
    try:
        return ModelShape.from_config(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def node_labels(layout: Layout, subject: Subject) -> list[str]:
    """The override that puts each side on nodes of its own devices, where there are several groups of them."""
    if len(subject.clusters) == 1:
        return []
    on = {"learner": layout.learner_on, **dict.fromkeys(("generator", *subject.kinds), layout.generators_on)}
    known = catalogue()
    names = {kind: subject.clusters[group].device.name for kind, group in on.items()}
    labels = {kind: known[name].get("accelerator_type", name) for kind, name in names.items()}
    words = ", ".join(f"{kind}: {{ray.io/accelerator-type: {label}}}" for kind, label in labels.items())
    return [f"cluster.node_labels={{{words}}}"]


def layout_of(config: RunConfig, here: bool) -> Layout:
    """The layout of the config."""
    own, vllm = config.learner, config.generator.vllm
    stage = str(own.zero_stage) if own.backend == "deepspeed" else ("fsdp2" if own.sharding == "fsdp2" else "0")
    return Layout(
        config.cluster.placement if here or config.cluster.placement != "auto" else "separate",
        config.generator.replicas if config.generator.groups is None else 1,
        *((1, 1) if here else (vllm.tensor_parallel_size, vllm.pipeline_parallel_size)),
        config.generator.slots,
        own.ranks,
        stage,
        own.sequence_parallel_size,
        own.zero_offload != "none",
        bool(own.gradient_checkpointing),
        max_staleness=config.async_.bound,
        publish_every=config.weights.publish_every,
        batch_size=config.batch_size,
        learner_tensor=own.tensor_parallel_size,
        context_parallel=own.context_parallel_size,
        learner_pipeline=own.pipeline_parallel_size,
    )


def space_of(
    subject: Subject,
    devices: Sequence[int],
    config: RunConfig,
    kept: set[str | None],
    keep: Sequence[str],
    free_batch: bool,
) -> Space:
    """The space of layouts on ``devices`` of each group; the fields ``kept`` stay as the user's overrides say."""
    base, here = subject.base, subject.measured is not None

    def values(name: str, *of: Any) -> tuple[Any, ...]:
        return (getattr(base, name),) if name in kept else of

    most = max(devices)
    slots = {max(1, round(base.slots * f)) for f in (0.25, 0.5, 1, 2)} if here else SLOTS
    batches = [base.batch_size // 2, base.batch_size, 2 * base.batch_size] if free_batch else [base.batch_size]
    axes = {
        "placement": values("placement", *(("auto", "flatten") if here else ("separate", "flatten"))),
        "max_staleness": values("max_staleness", *BOUNDS),
        "publish_every": values("publish_every", *PUBLISHES),
        "batch_size": batches,
    }
    generators = [
        replace(base, replicas=replicas, tensor=tensor, pipeline=pipeline, slots=size, generators_on=group)
        for group, cluster in enumerate(subject.clusters)
        for tensor in values("tensor", *([1] if here else _tensors(subject, cluster.per_node)))
        for pipeline in values("pipeline", *([1] if here or tensor < cluster.per_node else [1, 2, 4]))
        for replicas in values("replicas", *counts(devices[group] // (tensor * pipeline)))
        for size in values("slots", *sorted(slots))
    ]
    learners = [
        replace(base, ranks=ranks, learner_on=group, **more)
        for group in range(len(devices))
        for ranks in values("ranks", *counts(most))
        if ranks <= devices[group]
        for more in ([{}] if here else _learners(subject, ranks, values, subject.clusters[group].per_node))
    ]
    groups = config.batch_size // config.num_generations
    learners = [layout for layout in learners if layout.shares <= groups]  # each share takes whole groups of a batch
    try:
        return Space(learners, generators, devices, axes, [keeps(said) for said in keep])
    except ValueError as error:
        raise ConfigError(f"plan: --keep {error}.") from error


def _tensors(subject: Subject, per_node: int) -> list[int]:
    shape = subject.shape
    return [t for t in (1, 2, 4, 8) if t <= per_node and not shape.heads % t and not shape.kv_heads % t]


def _learners(
    subject: Subject, ranks: int, values: Callable[..., tuple[Any, ...]], per_node: int
) -> list[Mapping[str, Any]]:
    """The possible fields of a learner layout with this number of ranks. Ranks that divide matrices share a node."""
    shape = subject.shape
    return [
        {"sharding": sharding, "sequence_parallel": parallel, "learner_tensor": tensor, "context_parallel": context,
         "learner_pipeline": pipeline, "offload": offload, "checkpointing": checkpointing, "services": services}
        for sharding in values("sharding", *(("0",) if ranks == 1 else ("0", "1", "2", "3", "fsdp2")))
        for parallel in values("sequence_parallel", 1, 2, 4)
        if parallel == 1 or (sharding in "123" and not ranks % parallel and not shape.heads % parallel)
        for tensor in values("learner_tensor", *_tensors(subject, per_node))
        if tensor == 1 or sharding in ("0", "fsdp2")
        for context in values("context_parallel", 1, 2, 4)
        if context == 1 or sharding in ("0", "fsdp2")
        for pipeline in values("learner_pipeline", 1, 2, 4, 8)
        if pipeline == 1 or (sharding == "0" and context == 1 and pipeline <= shape.layers)
        if not ranks % (parallel * tensor * context * pipeline)
        for offload in values("offload", False, True)
        if not offload or sharding in "123"
        for checkpointing in values("checkpointing", False, True)
        for services in ((0, 1, 2) if subject.kinds else (0,))
    ]  # fmt: skip


class SimulatedRuns:
    """Says on stderr how many simulated runs are done, every SAY_EVERY seconds. ``most``: the largest number there can
    be; ``clock`` in seconds, a parameter for tests."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock, self._done, self._best, self._said = most, clock, 0, math.inf, clock()

    def __call__(self, figures: Mapping[str, float]) -> None:
        self._done, self._best = self._done + 1, min(self._best, figures["step_seconds"])
        if self._clock() - self._said >= SAY_EVERY:
            self._said = self._clock()
            step = seconds_in_words(self._best)
            said = f"{self._done} of at most {self._most} runs are simulated; the shortest step so far takes {step}."
            print(said, file=sys.stderr, flush=True)


def choose_layout(task: Task, simulated: int) -> Chosen:
    told = SimulatedRuns(simulated + FINALISTS * (len(SEEDS) - 1))
    asked = changed(task.settings)
    generator = asked.generator
    derived = task.gpus and generator.groups is None and generator.vllm.gpu_memory_utilization is None

    def valid(layout: Layout) -> str | None:
        # The search asks about one learner beside hundreds of generators, and a whole config takes 30 ms.
        stays = asked.cluster.offload is False or layout.sharding in ("1", "2", "3") or layout.learner_pipeline > 1
        if derived and stays and layout.placement == "flatten":
            return KEEPS_MEMORY
        try:
            changed(task.settings, *task.overrides(layout))
        except ConfigError as error:
            return str(error)
        return None

    def run(layout: Layout, seed: int) -> Mapping[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            figures = simulated_run(task, layout, seed, Path(folder) / "run")
        told(figures)
        return figures

    try:
        return choose(task.space, task.subject, valid, run, simulated)
    except ValueError as error:
        raise ConfigError(f"plan: {str(error).rstrip('.')}.") from error


def simulated_run(task: Task, layout: Layout, seed: int, folder: Path) -> dict[str, float]:
    """The figures of a simulated run with this layout; its records are written to ``folder``."""
    start = 6 + layout.max_staleness
    quiet = (f"seed={seed}", f"steps={start + MEASURED_STEPS + layout.max_staleness + 2}", "logging.progress=none")
    planned = changed(task.settings, *task.overrides(layout))
    config = changed(task.settings, *task.overrides(layout), *OVERRIDES, *quiet)
    alike = config.generator.groups is None
    cohort = max(
        k
        for k in range(1, layout.replicas + 1)
        if not layout.replicas % k and (k == 1 or (alike and layout.replicas // k >= HANDLES))
    )
    stops, seconds = task.hiccups
    costs = costs_of(layout, task.subject)
    shared = sharing(planned, costs, task.cores)
    conditions = Conditions(
        hiccups=stops, hiccup_seconds=seconds, interference=task.interference, cohort=cohort, **shared
    )
    config = in_cohorts(config, cohort)
    simulate(config, costs, task.subject.workload, folder, conditions, take_turns=layout.placement == "flatten")
    return figures(read_metrics(folder / METRICS_FILE), layout.max_staleness, start)


def write(task: Task, chosen: Chosen, out: Path, words: Sequence[str]) -> None:
    """Write the plan's files to the folder of ``out`` under its name, and print its reasons."""
    config = changed(task.settings, *task.overrides(chosen.best.layout), f"name={out.name}")
    with tempfile.TemporaryDirectory() as folder:
        simulated_run(task, chosen.best.layout, 0, Path(folder) / "run")
        written = write_plan(out, config, chosen, task.subject, Path(folder) / "run", (task.source, *words))
    for sentence in sentences(chosen, task.subject):
        print(sentence)
    print(f"Plan: {', '.join(map(str, written))}")
    print(f"Run it: asyncrlhf train --config-dir={out.parent} experiment={out.name}")
