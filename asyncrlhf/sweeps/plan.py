"""From a command line to the jobs of a sweep: every combination of the choices, each with a checked config."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from asyncrlhf.config.compose import check_words, compose_config, hydra_sentence, split_config_dir, sweep_jobs
from asyncrlhf.config.run_config import RunConfig, from_hydra, to_plain
from asyncrlhf.config.sweep_config import SweepConfig
from asyncrlhf.errors import ConfigError, ContradictionError
from asyncrlhf.redaction import redact
from asyncrlhf.validation import check

# Settings that do not change what a job computes.
_NOT_IN_HASH = ("run_dir", "name", "logging", "checkpoint", "sweep")
_MAX_NAME = 120


@dataclass(frozen=True)
class Job:
    """One run of a sweep. ``choices``: what differs between the jobs of its grid, the seed left out."""

    name: str
    part: str
    timing: str
    choices: dict[str, str]
    seed: int
    overrides: tuple[str, ...]
    config: RunConfig
    hash: str

    @property
    def exclusive(self) -> bool:
        return self.timing == "exclusive"


@dataclass(frozen=True)
class SweepPlan:
    """All jobs, in the order of their start. ``folder_name`` is the same whatever the order of the overrides."""

    name: str
    jobs: tuple[Job, ...]
    settings: SweepConfig
    overrides: tuple[str, ...]
    config_dir: Path | None
    left_out: tuple[str, ...] = ()  # combinations whose settings contradict each other, with the reason

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{_digest(sorted(job.hash for job in self.jobs))[:8]}"


def plan_sweep(arguments: Sequence[str]) -> SweepPlan:
    """Read ``asyncrlhf sweep``'s overrides; raises ConfigError for the first job that could not run. Combinations that
    contradict themselves, such as ``async.mode=sync`` with another bound than 0, are left out and listed.

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
    first = _first(overrides, folder)
    settings = first.sweep
    experiment = next((o.partition("=")[2] for o in overrides if _key(o) == "experiment"), "")
    jobs: list[Job] = []
    left_out: list[str] = []
    for part, grid in settings.grids.items():
        own = [override for override in grid.overrides if _key(override) not in map(_key, overrides)]
        jobs += _grid([*own, *overrides], folder, part, grid.seeds, grid.timing, left_out)
    jobs = _distinct(jobs)
    check(jobs, f"no job of the sweep can run: {' '.join(left_out)}")
    names = {job.name for job in jobs}
    check(len(names) == len(jobs), "two jobs of the sweep would have one name; give each a choice of its own.")
    ordered = sorted(jobs, key=lambda job: (job.exclusive, job.seed))  # stable: configurations alternate within a seed
    name = settings.name or experiment or first.name
    check(re.fullmatch(r"[\w.+-]+", name), f"sweep.name={name} must be a folder's name: letters, digits and . + - _.")
    return SweepPlan(name, tuple(ordered), settings, tuple(overrides), folder, tuple(left_out))


def _grid(
    overrides: list[str], folder: Path | None, part: str, seeds: int, timing: str, left_out: list[str]
) -> list[Job]:
    """The jobs of one grid; what contradicts itself goes to ``left_out``."""
    swept = {key for key, values in _values(sweep_jobs(overrides)).items() if len(values) > 1 and key != "seed"}
    own_seeds = not any(_key(override) == "seed" for override in overrides)
    jobs = []
    for combination in sweep_jobs(overrides):
        choices = {_key(override): _value(override) for override in combination if _key(override) in swept}
        try:
            composed = from_hydra(compose_config(combination, folder))
        except ContradictionError as error:
            words = ", ".join(f"{key}={value}" for key, value in choices.items())
            left_out.append(f"{' '.join(filter(None, [part, words]))}: {error}")
            continue
        if "async.max_staleness" in swept and composed.async_.pacing == "auto" and composed.async_.mode == "async":
            combination = [*combination, "async.pacing=fill"]  # paced, two bounds may come to one staleness
            composed = replace(composed, async_=replace(composed.async_, pacing="fill"))
        kept = tuple(o for o in combination if not _key(o).startswith("sweep."))
        for seed in range(seeds) if own_seeds else [composed.seed]:
            config = replace(composed, seed=seed)
            given = (*kept, f"seed={seed}") if own_seeds else kept
            name = _job_name(part, choices, seed)
            jobs.append(Job(name, part, timing, choices, seed, given, config, config_hash(config, timing)))
    return jobs


def _first(overrides: Sequence[str], folder: Path | None) -> RunConfig:
    """One job of the command line: enough to read ``sweep.*``, which no choice may touch."""
    combinations = sweep_jobs(overrides)
    for key, values in _values(combinations).items():
        if len(values) > 1 and (key == "experiment" or key.startswith("sweep.")):
            raise ConfigError(f"{key} has several values, {', '.join(sorted(values))}; a sweep takes one.")
    composed = compose_config(combinations[0], folder)
    with suppress(ContradictionError):
        return from_hydra(composed)
    composed["async"].update({"max_staleness": None, "lag": None})  # a grid may bring the mode that they belong to
    return from_hydra(composed)


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
    """As the config will hold it: without quotes and escapes."""
    return str(OverridesParser.create().parse_override(override).value())


def _distinct(jobs: Sequence[Job]) -> list[Job]:
    """Two grids may share a job; it runs once."""
    return list({job.hash: job for job in jobs}.values())


def _job_name(part: str, choices: dict[str, str], seed: int) -> str:
    """``speed,async=sync,lr=1e-3,seed=0``: a folder's name of what differs."""
    short = {key.rpartition(".")[2]: key for key in choices}
    unique = {key: tail if short[tail] == key else key for tail, key in short.items()}
    words = [f"{unique.get(key, key)}={redact(value)}" for key, value in choices.items()]
    name = ",".join([*([part] if part else []), *words, f"seed={seed}"])
    name = re.sub(r"[^\w.,=+-]", "_", name)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 9]}-{_digest(name)[:8]}"


def config_hash(config: RunConfig, timing: str) -> str:
    """What decides over a job's result: its resolved settings, and whether it has the machine alone."""
    kept = {key: value for key, value in to_plain(config, whole=True).items() if key not in _NOT_IN_HASH}
    return _digest([timing, kept])[:16]


def data_fingerprint(config: RunConfig) -> dict[str, str]:
    """The local files that a job reads, ``setting=path`` to a digest of names, sizes and times of change."""
    found: dict[str, str] = {}
    for setting, given in (("task.path", config.task.path), ("model.path", config.model.path)):
        path = Path(given).expanduser()
        if given and path.exists():
            files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            facts = [[str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
            found[f"{setting}={given}"] = _digest(facts)[:16]
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
