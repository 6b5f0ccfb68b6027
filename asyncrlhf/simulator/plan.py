"""A plan: the best layout for given devices, chosen among simulated runs."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from asyncrlhf.config.compose import compose_config
from asyncrlhf.config.run_config import KEEPS_MEMORY
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.simulator.given import changed, fitted_costs, read_profile, settings_of_run, sharing, workload_of
from asyncrlhf.simulator.plan_space import clusters_of, layout_of, node_labels, shape_of, space_of
from asyncrlhf.validation import check_folder_name

if TYPE_CHECKING:
    from asyncrlhf.planner.choose import Chosen, Space
    from asyncrlhf.planner.layout import Layout
    from asyncrlhf.planner.ranking import Subject


MEASURED_STEPS = 12  # of a simulated run, without its beginning and its end
SAY_EVERY = 5.0  # seconds between two lines about the progress


HANDLES = 16  # least number of simulated replicas; each may represent several
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
        from asyncrlhf.planner.layout import overrides

        return [*overrides(layout, gpus=self.gpus, kinds=self.subject.kinds), *node_labels(layout, self.subject)]


def task_of(options: argparse.Namespace, overrides: Sequence[str], folder: Path | None) -> Task:
    """The task that the command's ``options`` describe; raises ConfigError with one sentence for invalid input."""
    from asyncrlhf.planner.fit import hiccups_of_run
    from asyncrlhf.planner.ranking import Subject
    from asyncrlhf.planner.shapes import Workload

    settings = settings_of_run(options.run, overrides) if options.run else compose_config(overrides, folder)
    config = changed(settings)
    lengths, hiccups, interference, costs = None, (0.0, 0.0), (1.0, 1.0), None
    try:
        if options.run is not None:
            costs, _ = fitted_costs(options.run)
            lengths, hiccups = workload_of(options.run), hiccups_of_run(options.run)
        elif options.profile is not None:
            costs, lengths, interference = read_profile(options.profile, config)
        if options.mean_length is not None:
            longest = config.generator.max_completion_length
            lengths = Workload(options.prompt_length or 0.0, min(options.mean_length, longest), options.cv, longest)
        clusters = clusters_of(options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if lengths is None:
        raise ConfigError(
            "plan: no response lengths are known; give --mean-length TOKENS (and --cv, --prompt-length), or --from RUN."
        )
    kinds = tuple(kind for kind in ("reference", "critic") if getattr(config.algorithm, f"needs_{kind}"))
    subject = Subject(
        shape_of(config),
        lengths,
        config.num_generations,
        clusters,
        layout_of(config, costs is not None),
        costs,
        kinds,
        config.learner.token_budget,
        "float32" if costs is not None and config.learner.mixed_precision == "none" else "bfloat16",
    )
    space = space_of(subject, options, config, {DECIDES.get(word.partition("=")[0].lstrip("+~")) for word in overrides})
    source = str(options.run or options.profile or options.device)
    return Task(settings, subject, space, costs is None, hiccups, source, interference, options.cores)


class SimulatedRuns:
    """Says on stderr how many simulated runs are done, every SAY_EVERY seconds. ``most``: the largest number there can
    be; ``clock`` in seconds, a parameter for tests."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock, self._done, self._best, self._said = most, clock, 0, math.inf, clock()

    def __call__(self, figures: Mapping[str, float]) -> None:
        from asyncrlhf.planner.explain import seconds_in_words

        self._done, self._best = self._done + 1, min(self._best, figures["step_seconds"])
        if self._clock() - self._said >= SAY_EVERY:
            self._said = self._clock()
            step = seconds_in_words(self._best)
            said = f"{self._done} of at most {self._most} runs are simulated; the shortest step so far takes {step}."
            print(said, file=sys.stderr, flush=True)


def choose_layout(task: Task, simulated: int) -> Chosen:
    from asyncrlhf.planner.choose import FINALISTS, SEEDS, choose

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
    from asyncrlhf.planner.ranking import costs_of
    from asyncrlhf.simulator.cost_world import Conditions
    from asyncrlhf.simulator.simulate import OVERRIDES, figures, in_cohorts, simulate

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


def write(task: Task, chosen: Chosen, out: Path, overrides: Sequence[str]) -> None:
    from asyncrlhf.planner.explain import sentences
    from asyncrlhf.simulator.plan_files import write_plan

    check_folder_name("plan --out", out.name)
    config = changed(task.settings, *task.overrides(chosen.best.layout), f"name={out.name}")
    with tempfile.TemporaryDirectory() as folder:
        simulated_run(task, chosen.best.layout, 0, Path(folder) / "run")
        written = write_plan(out, config, chosen, task.subject, Path(folder) / "run", (task.source, *overrides))
    for sentence in sentences(chosen, task.subject):
        print(sentence)
    print(f"Plan: {', '.join(map(str, written))}")
    print(f"Run it: asyncrlhf train --config-dir={out.parent} experiment={out.name}")
