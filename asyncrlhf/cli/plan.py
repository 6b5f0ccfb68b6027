"""``asyncrlhf plan``: the best layout for given devices, and an experiment file for ``train``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from asyncrlhf.cli.plan_space import clusters_of, layout_of, node_labels, shape_of, space_of
from asyncrlhf.cli.simulate import Parser, changed, fitted_costs, settings_of_run, sharing, workload_of
from asyncrlhf.config.compose import check_words, compose_config, split_config_dir
from asyncrlhf.config.run_config import KEEPS_MEMORY
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.recorder import METRICS_FILE, read_metrics
from asyncrlhf.validation import check, check_folder_name, typed_path

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


OTHER_SYSTEMS = {"--what-if": "what_if", "--compare-templates": "compare_templates"}  # with their own options


def plan(arguments: Sequence[str]) -> int:
    rest, folder = split_config_dir(arguments)
    for word, verb in OTHER_SYSTEMS.items():
        if word in rest:
            from asyncrlhf.cli import whatif

            return getattr(whatif, verb)([other for other in rest if other != word])  # type: ignore[no-any-return]
    options, overrides = plan_parser().parse_known_args(rest)
    if options.compare is not None:
        from asyncrlhf.cli.plan_files import compare

        check(not overrides, f"plan --compare takes a plan and a run, and no {' '.join(overrides)}.")
        compare(*options.compare)
        return 0
    check_words(overrides)
    task = _task(options, overrides, folder)
    chosen = _choose(task, options.simulate)
    _write(task, chosen, options.out, overrides)
    return 0


def plan_parser() -> Parser:
    """Options of the command; all other words are overrides."""
    parser = Parser(prog="asyncrlhf plan", description="The best layout for devices, simulated before it is run.")
    parser.add_argument(
        "--from", dest="run", type=typed_path, metavar="RUN", help="plan for this machine with the costs of a run"
    )
    parser.add_argument("--profile", type=typed_path, help="plan for this machine, costs of `asyncrlhf profile`")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="cores of this machine that the plan may use")
    parser.add_argument("--gpus", help="number of catalogue devices, such as 16; for several groups: 8,16")
    parser.add_argument("--device", help="their name, such as H100; for several groups: H100,L4")
    parser.add_argument("--per-node", type=int, default=0, help="devices per node (default: the catalogue's)")
    parser.add_argument("--prompt-length", type=float, default=None, help="mean tokens per prompt")
    parser.add_argument("--mean-length", type=float, default=None, help="mean tokens per response, log-normal")
    parser.add_argument("--cv", type=float, default=0.5, help="coefficient of variation of the response lengths")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        help="condition on a decision, [WHY=]NAME<=VALUE, such as max_staleness<=2",
    )
    parser.add_argument(
        "--free", action="append", default=[], choices=["batch_size"], help="further setting that the plan may change"
    )
    parser.add_argument("--simulate", type=int, default=32, help="number of layouts to simulate")
    parser.add_argument("--out", type=typed_path, default=Path("plans/plan"), help="FOLDER/NAME of files (plans/plan)")
    parser.add_argument("--compare-templates", action="store_true", help="compare common templates on equal devices")
    parser.add_argument("--what-if", action="store_true", help="plan like other systems; train cannot run these plans")
    parser.add_argument(
        "--compare", nargs=2, type=typed_path, metavar=("PLAN", "RUN"), help="compare predicted with measured figures"
    )
    return parser


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


def _task(options: argparse.Namespace, overrides: Sequence[str], folder: Path | None) -> Task:
    """Raises ConfigError with one sentence for invalid input."""
    from asyncrlhf.cli.profile import read_profile
    from asyncrlhf.planner.fit import hiccups_of_run
    from asyncrlhf.planner.ranking import Subject
    from asyncrlhf.planner.shapes import Workload

    given = [name for name in ("run", "profile", "gpus") if getattr(options, name) is not None]
    say = plan_parser().error
    if len(given) != 1:
        say("give one of --from, --profile and --gpus")
    if (options.gpus is None) != (options.device is None):
        say("--gpus and --device belong together, as in --gpus 16 --device H100")
    for name, least in (
        ("cores", 1),
        ("simulate", 1),
        ("per_node", 0),
        ("mean_length", 1.0),
        ("prompt_length", 1.0),
        ("cv", 0.0),
    ):
        value = getattr(options, name)
        if value is not None and not value >= least:
            say(f"--{name.replace('_', '-')} {value:g} is too small; at least {least:g}")
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
        say("no response lengths are known; give --mean-length TOKENS (and --cv, --prompt-length), or --from RUN")
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


def _choose(task: Task, simulated: int) -> Chosen:
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
    from asyncrlhf.cluster.cost_world import Conditions
    from asyncrlhf.orchestrator.simulate import OVERRIDES, figures, in_cohorts, simulate
    from asyncrlhf.planner.ranking import costs_of

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


def _write(task: Task, chosen: Chosen, out: Path, overrides: Sequence[str]) -> None:
    from asyncrlhf.cli.plan_files import write_plan
    from asyncrlhf.planner.explain import sentences

    check_folder_name("plan --out", out.name)
    config = changed(task.settings, *task.overrides(chosen.best.layout), f"name={out.name}")
    with tempfile.TemporaryDirectory() as folder:
        simulated_run(task, chosen.best.layout, 0, Path(folder) / "run")
        written = write_plan(out, config, chosen, task.subject, Path(folder) / "run", (task.source, *overrides))
    for sentence in sentences(chosen, task.subject):
        print(sentence)
    print(f"Plan: {', '.join(map(str, written))}")
    print(f"Run it: asyncrlhf train --config-dir={out.parent} experiment={out.name}")
