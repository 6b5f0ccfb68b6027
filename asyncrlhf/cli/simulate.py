"""``asyncrlhf simulate``: simulates a run on the virtual clock with the costs of a run or a profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table

from asyncrlhf.cli import first_look
from asyncrlhf.config.compose import check_words, load_config
from asyncrlhf.config.conversion import from_hydra
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.recorder import METRICS_FILE, read_metrics
from asyncrlhf.validation import typed_path

USAGE = {
    "profile": "asyncrlhf profile [--from RUN] [--seconds S] [--out FILE] [overrides]",
    "plan": "asyncrlhf plan (--from RUN | --profile FILE | --gpus N --device NAME) [--out FOLDER/NAME] [overrides]",
    "simulate": "asyncrlhf simulate (--from RUN | --profile FILE) [--out FOLDER] [overrides]",
}


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, usage=USAGE[prog.split()[-1]])

    def error(self, message: str) -> NoReturn:
        """Print one sentence about the error instead of a usage text."""
        raise ConfigError(f"{self.prog.split()[-1]}: {message}; write {USAGE[self.prog.split()[-1]]}.")


def fitted_costs(run: Path) -> tuple[Any, dict[str, Any]]:
    """Costs of a run, and their origin. Of parts that share the cores of one machine they are CPU seconds."""
    from asyncrlhf.actors.where import available_cores
    from asyncrlhf.cluster.parts import cores_of
    from asyncrlhf.planner.fit import costs_of_run

    check_run(run)
    try:
        cores = cores_of(changed(settings_of_run(run, ())), available_cores())
        costs = costs_of_run(run, cpu=cores is not None, apart=cores is not None and not cores.learner)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    summary = run / "summary.json"
    known = json.loads(summary.read_text()) if summary.is_file() else {}
    return costs, {"run": str(run), **{key: known[key] for key in ("git_commit", "versions", "seed") if key in known}}


def workload_of(run: Path) -> Any:
    """The workload of a run. What it dropped in flight counts as at least as long as it had become by then."""
    from asyncrlhf.planner.fit import workload_of_run
    from asyncrlhf.records.cut_short import cut_lengths

    longest = changed(settings_of_run(run, ())).generator.max_completion_length
    return workload_of_run(run, cut_lengths(run), longest)


def sharing(config: RunConfig, costs: Any, cores: int) -> dict[str, Any]:
    """The :class:`Conditions` of parts that share ``cores`` of one machine, if the costs are CPU seconds."""
    from asyncrlhf.actors.generator import GeneratorActor
    from asyncrlhf.cluster.parts import cores_of
    from asyncrlhf.transport.build_transport import may_share_memory

    if not (costs.call or costs.message):
        return {}
    replicas = sum(kind.config.replicas for kind in replica_kinds(config.generator))
    shared = cores_of(config, range(cores))
    if shared is not None:  # half of them remain: what uses more is outside this container
        shared = replace(shared, shared=max(shared.shared / 2, shared.shared - costs.others), cold=costs.cold)
    learner, adapter = config.learner, config.model.lora.r > 0
    maps = not config.ray.cluster and may_share_memory(config.weights, sharded=learner.sharded, adapter=adapter)
    return {"cores": shared, "linger": GeneratorActor.result_seconds(replicas), "maps": maps}


def check_run(run: Path) -> None:
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(f"{run} holds no {METRICS_FILE}; give the directory of a run.")
    summary = run / "summary.json"
    if summary.is_file() and json.loads(summary.read_text()).get("simulated"):
        raise ConfigError(f"{run} is a simulated run, which measured no costs; give a real run.")


def simulate(arguments: Sequence[str]) -> int:
    parser = Parser(prog="asyncrlhf simulate", description="Predicts a run on the virtual clock.")
    parser.add_argument("--from", dest="run", type=typed_path, metavar="RUN", help="a run with config, costs, lengths")
    parser.add_argument("--profile", type=typed_path, help="costs and lengths of `asyncrlhf profile`")
    parser.add_argument("--out", type=typed_path, default=None, help="folder of the simulated run's records")
    parser.add_argument(
        "--mean-length", type=float, help="mean tokens per response, log-normal, instead of recorded lengths"
    )
    parser.add_argument("--cv", type=float, default=0.5, help="coefficient of variation of these lengths")
    parser.add_argument("--failures", type=float, default=0.0, help="deaths per replica and hour")
    parser.add_argument("--cohort", type=int, default=1, help="equal replicas that each simulated one represents")
    options, overrides = parser.parse_known_args(list(arguments))
    if (options.run is None) == (options.profile is None):
        parser.error("give one of --from and --profile")
    for name, least in (("mean_length", 1.0), ("cv", 0.0), ("failures", 0.0), ("cohort", 1)):
        given = getattr(options, name)
        if given is not None and not given >= least:
            parser.error(f"--{name.replace('_', '-')} {given:g} is too small; at least {least:g}")
    summary, measured = _simulate(options, overrides)
    _show(summary, measured)
    return 0


def _simulate(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, float] | None]:
    """The simulated run's summary with its figures, and those of the real run if no setting was changed."""
    from asyncrlhf.actors.where import available_cores
    from asyncrlhf.cli.profile import read_profile
    from asyncrlhf.cluster.cost_world import Conditions
    from asyncrlhf.orchestrator.run import new_run_dir
    from asyncrlhf.orchestrator.simulate import OVERRIDES, figures, in_cohorts, simulate
    from asyncrlhf.planner.fit import hiccups_of_run
    from asyncrlhf.planner.shapes import Workload

    hiccups, interference, lengths, shared = (0.0, 0.0), (1.0, 1.0), None, dict[str, Any]()
    try:
        if options.run is not None:
            costs, _ = fitted_costs(options.run)
            config = config_of_run(options.run, overrides)
            shared = sharing(changed(settings_of_run(options.run, overrides)), costs, len(available_cores()))
            lengths, hiccups = workload_of(options.run), hiccups_of_run(options.run)
        else:
            config = load_config([*overrides, *OVERRIDES])
            costs, lengths, interference = read_profile(options.profile, config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.mean_length is not None:
        lengths = Workload(0.0, options.mean_length, options.cv, config.generator.max_completion_length)
    if lengths is None:
        raise ConfigError("simulate: a profile holds no response lengths; give --mean-length TOKENS (and --cv).")
    conditions = Conditions(
        failures=options.failures,
        hiccups=hiccups[0],
        hiccup_seconds=hiccups[1],
        interference=interference,
        cohort=options.cohort,
        **shared,
    )
    folder = options.out or new_run_dir(f"simulated-{config.name}")
    summary = simulate(in_cohorts(config, options.cohort), costs, lengths, folder, conditions)
    found = figures(read_metrics(folder / METRICS_FILE), config.async_.bound)
    measured = None
    if options.run is not None and not overrides:
        measured = figures(read_metrics(options.run / METRICS_FILE), config.async_.bound)
    return {**summary, "run_dir": str(folder), "figures": found}, measured


def config_of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own config, with the changes, as a simulated run."""
    from asyncrlhf.orchestrator.simulate import OVERRIDES

    return changed(settings_of_run(run, overrides), *OVERRIDES)


def settings_of_run(run: Path, overrides: Sequence[str]) -> DictConfig:
    """The run's settings, with the changes, for a new run without display and sinks."""
    check_words(overrides)
    saved = first_look.settings_of_run(str(run), run)
    own = {"run_dir": "", "checkpoint": {"resume": "no"}, "logging": {"progress": "none", "report": False}}
    merged = OmegaConf.merge(saved, OmegaConf.from_dotlist(list(overrides)), own)
    assert isinstance(merged, DictConfig)
    return merged


def changed(settings: DictConfig, *overrides: str) -> RunConfig:
    """The config of these settings with changes; raises ConfigError with one sentence."""
    merged = OmegaConf.merge(settings, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return from_hydra(merged)


ROWS = (
    ("step_seconds", "seconds per step", "{:.4f}"),
    ("learner_idle", "learner idle", "{:.2f}"),
    ("generator_idle", "generators idle", "{:.2f}"),
    ("staleness", "staleness", "{:.2f}"),
    ("dropped_share", "dropped of trained", "{:.3f}"),
)


def _show(summary: dict[str, Any], measured: dict[str, float] | None) -> None:
    names = ["simulated", "measured"] if measured else ["simulated"]
    table = Table(
        "", *(Column(name, justify="right") for name in names), title=f"{summary['steps']} steps on the virtual clock"
    )
    for key, name, form in ROWS:
        cells = [form.format(summary["figures"][key]), *([form.format(measured[key])] if measured else [])]
        table.add_row(name, *cells)
    Console().print(table)
    cost = summary["controller_ms_per_rollout"]
    trained = summary["ledger"]["trained"]
    load = cost / 1e3 * trained / summary["wall_seconds"] if summary["wall_seconds"] else 0.0
    print(f"The controller took {cost:.2f} ms of this machine per rollout: {load:.0%} of one core at this rate.")
    if load > 0.5:
        print("One controller cannot keep up: use fewer, larger replicas, or a faster core.")
    print(f"Run directory: {summary['run_dir']}")
