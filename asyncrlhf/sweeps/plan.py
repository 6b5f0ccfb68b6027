"""From a command line to the jobs of a sweep: every combination of the choices, each with a checked config."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from asyncrlhf.config.compose import check_words, compose_config, hydra_sentence, split_config_dir, sweep_jobs
from asyncrlhf.config.conversion import from_hydra, to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.sweep_config import SweepConfig
from asyncrlhf.errors import ConfigError, ContradictionError
from asyncrlhf.records.show.metric_names import find_metric
from asyncrlhf.redaction import redact
from asyncrlhf.sweeps.job import Job
from asyncrlhf.sweeps.search import Axis, Search, split_space
from asyncrlhf.validation import check

# Settings that do not change what a job computes, so that no sweep can compare them.
WITHOUT_EFFECT = ("run_dir", "name", "logging", "checkpoint", "sweep")
_MAX_NAME = 120


@dataclass(frozen=True)
class SweepPlan:
    """All jobs, in the order of their start. ``folder_name`` does not depend on the order of the overrides.

    ``search``: creates jobs while the sweep runs; ``jobs`` is then empty. ``configs``: of the jobs, for checks before
    the first one starts.
    """

    name: str
    jobs: tuple[Job, ...]
    settings: SweepConfig
    overrides: tuple[str, ...]
    config_dir: Path | None
    configs: tuple[RunConfig, ...]
    left_out: tuple[str, ...] = ()  # combinations whose settings contradict each other, with the reason
    search: Search | None = None

    @property
    def folder_name(self) -> str:
        same = self.search.identity if self.search is not None else sorted(job.hash for job in self.jobs)
        return f"{self.name}-{_digest(same)[:8]}"

    @property
    def total(self) -> int:
        """The number of jobs, including those that a search will create."""
        return self.settings.trials * self.settings.seeds if self.search is not None else len(self.jobs)


def plan_sweep(arguments: Sequence[str]) -> SweepPlan:
    """Read ``asyncrlhf sweep``'s overrides; raises ConfigError for the first job that could not run. Combinations of
    contradicting settings, such as ``async.mode=sync`` with a bound, are left out and listed.

    ``seeds=N`` is short for ``sweep.seeds=N``. A choice of the command line replaces the experiment's of that key.
    """
    given, folder = split_config_dir(arguments)
    overrides = [re.sub(r"^seeds=", "sweep.seeds=", override) for override in given]
    check_words(overrides)
    for override in overrides:
        key = _key(override)
        if key.startswith("hydra"):
            raise ConfigError(f"{override} has no effect on a sweep; Hydra's own launchers serve asyncrlhf train -m.")
        check(key != "run_dir", "run_dir cannot be set for a sweep, whose jobs lie in its own folder; see sweep.name.")
    fixed, axes = split_space(overrides)
    for axis in axes:
        if axis.key == "experiment" or axis.key.startswith("sweep."):
            raise ConfigError(f"{axis.key} has several values, {', '.join(sorted(axis.choices))}; a sweep takes one.")
        _refuse_without_effect(axis.key)
    first = _first([*fixed, *(f"{axis.key}={axis.first}" for axis in axes)], folder)
    settings = first.sweep
    experiment = next((o.partition("=")[2] for o in overrides if _key(o) == "experiment"), "")
    name = settings.name or experiment or first.name
    check(re.fullmatch(r"[\w.+-]+", name), f"sweep.name={name} must be a folder's name: letters, digits and . + - _.")
    if settings.search != "none":
        search = _search(fixed, axes, folder, first)
        return SweepPlan(name, (), settings, tuple(overrides), folder, (first,), search=search)
    for axis in axes:
        check(
            not axis.interval, f"{axis.key}=interval(...) has no end of values; give sweep.search=optuna, or choices."
        )
    jobs: list[Job] = []
    left_out: list[str] = []
    for part, grid in settings.grids.items():
        own = [override for override in grid.overrides if _key(override) not in map(_key, overrides)]
        jobs += _grid([*own, *overrides], folder, part, grid.seeds, grid.timing, left_out)
    jobs = list({job.hash: job for job in jobs}.values())  # a job that is in two grids runs once
    check(jobs, f"no job of the sweep can run: {' '.join(left_out)}")
    names = {job.name for job in jobs}
    check(len(names) == len(jobs), "two jobs of the sweep would have one name; give each a choice of its own.")
    ordered = sorted(jobs, key=lambda job: (job.exclusive, job.seed))  # stable: configurations alternate within a seed
    configs = tuple(job.config for job in ordered)
    return SweepPlan(name, tuple(ordered), settings, tuple(overrides), folder, configs, tuple(left_out))


def _first(overrides: list[str], folder: Path | None) -> RunConfig:
    """One job of the command line, to read ``sweep.*`` from, which no choice may change."""
    composed = compose_config(overrides, folder)
    with suppress(ContradictionError):
        return from_hydra(composed)
    composed["async"].update({"max_staleness": None, "lag": None})  # a grid may set the mode that they belong to
    return from_hydra(composed)


def _search(fixed: list[str], axes: list[Axis], folder: Path | None, first: RunConfig) -> Search:
    settings = first.sweep
    check(
        settings.parts is None,
        "sweep.search=optuna searches one grid, and sweep.parts are several; give sweep.parts=null.",
    )
    check(axes, "sweep.search=optuna has nothing to choose from; give key=a,b or key=interval(0,1) of some settings.")
    check(
        all(axis.key != "seed" for axis in axes), "sweep.search=optuna chooses no seeds; give seeds=N for each trial."
    )
    goal = settings.objective
    check(find_metric(goal), f"sweep.objective={goal} is not a metric; docs/reference/metrics.md lists them.")
    swept = {axis.key for axis in axes}
    kept = [override for override in fixed if not _key(override).startswith("sweep.")]
    facts = [asdict(axis) for axis in sorted(axes, key=lambda axis: axis.key)]
    identity = [config_hash(first, settings.timing), facts, goal, settings.direction, settings.seeds]

    def make(number: int, chosen: Sequence[str]) -> list[Job]:
        part = f"trial-{number:03d}"
        return _jobs_of([*kept, *chosen], swept, folder, part, settings.seeds, settings.timing)

    return Search(axes, settings, first.seed, identity, make)


def _grid(
    overrides: list[str], folder: Path | None, part: str, seeds: int, timing: str, left_out: list[str]
) -> list[Job]:
    """The jobs of one grid; contradicting combinations are added to ``left_out``."""
    combinations, jobs = sweep_jobs(overrides), list[Job]()
    swept = {key for key, values in _values(combinations).items() if len(values) > 1 and key != "seed"}
    for key in swept:
        _refuse_without_effect(key)
    for each in combinations:
        words = ", ".join(f"{_key(o)}={_value(o)}" for o in each if _key(o) in swept)
        try:
            made = _jobs_of(each, swept, folder, part, seeds, timing)
        except ContradictionError as error:
            left_out.append(f"{' '.join(filter(None, [part, words]))}: {error}")
            continue
        same = {job.hash: job for job in jobs}
        if made[0].hash in same:
            given = " ".join(filter(None, [part, words or " ".join(each)]))
            left_out.append(f"{given}: computes the same as {same[made[0].hash].name}.")
        else:
            jobs += made
    return jobs


def _refuse_without_effect(key: str) -> None:
    """Raise ConfigError for several values of a setting that does not change what a job computes."""
    check(
        key.partition(".")[0] not in WITHOUT_EFFECT,
        f"{key} has several values and does not change what a job computes, so a sweep has nothing to compare; "
        f"give one value. The same holds for all settings of {', '.join(WITHOUT_EFFECT)}.",
    )


def _jobs_of(
    combination: list[str], swept: set[str], folder: Path | None, part: str, seeds: int, timing: str
) -> list[Job]:
    """One configuration's jobs, one per seed."""
    own_seeds = not any(_key(override) == "seed" for override in combination)
    choices = {_key(override): _value(override) for override in combination if _key(override) in swept}
    composed = from_hydra(compose_config(combination, folder))
    kept = tuple(o for o in combination if not _key(o).startswith("sweep."))
    jobs = []
    for seed in range(seeds) if own_seeds else [composed.seed]:
        config = replace(composed, seed=seed)
        given = (*kept, f"seed={seed}") if own_seeds else kept
        name = _job_name(part, choices, seed)
        jobs.append(Job(name, part, timing, choices, seed, given, config, config_hash(config, timing)))
    return jobs


def _values(combinations: Sequence[Sequence[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for combination in combinations:
        for override in combination:
            found.setdefault(_key(override), set()).add(override.partition("=")[2])
    return found


def _key(override: str) -> str:
    try:
        return str(OverridesParser.create().parse_override(override).get_key_element()).lstrip("+~")
    except HydraException as error:
        raise ConfigError(hydra_sentence(error)) from error


def _value(override: str) -> str:
    """The value as the config holds it: without quotes and escapes."""
    return str(OverridesParser.create().parse_override(override).value())


def _job_name(part: str, choices: dict[str, str], seed: int) -> str:
    """``speed,async=sync,lr=1e-3,seed=0``: the differing settings as a folder's name."""
    short = {key.rpartition(".")[2]: key for key in choices}
    unique = {key: tail if short[tail] == key else key for tail, key in short.items()}
    words = [f"{unique.get(key, key)}={redact(value)}" for key, value in choices.items()]
    name = ",".join([*([part] if part else []), *words, f"seed={seed}"])
    name = re.sub(r"[^\w.,=+-]", "_", name)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 9]}-{_digest(name)[:8]}"


def config_hash(config: RunConfig, timing: str) -> str:
    """A hash of all that affects a job's result: its resolved settings, and whether it runs alone on the machine."""
    kept = {key: value for key, value in to_plain(config, whole=True).items() if key not in WITHOUT_EFFECT}
    return _digest([timing, kept])[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
