"""Jobs of a folder that Hydra wrote (``train -m``, with ``multirun.yaml``): their results, and which left no run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import CONFIG_FILE, METRICS_FILE, read_summary
from asyncrlhf.report.load import read_yaml
from asyncrlhf.sweeps.plan import WITHOUT_EFFECT
from asyncrlhf.sweeps.results import Results, results_of

MULTIRUN_FILE = "multirun.yaml"


def is_multirun(path: Path) -> bool:
    return (Path(path) / MULTIRUN_FILE).is_file()


def multiruns(paths: Sequence[Path]) -> list[Path]:
    """The folders of all multiruns that the paths name or contain."""
    return sorted({file.resolve().parent for path in map(Path, paths) for file in path.rglob(MULTIRUN_FILE)})


def missing_jobs(paths: Sequence[Path]) -> dict[str, str]:
    """The jobs of every multirun below the paths that left no run: one sentence each, by the job's folder."""
    found: dict[str, str] = {}
    for folder in multiruns(paths):
        for number, choices in enumerate(_choices(folder)):
            job = folder / str(number)
            if not (job / METRICS_FILE).is_file():
                said = " ".join(f"{key}={value}" for key, value in choices.items())
                found[str(job)] = f"{job} left no run ({said or 'the only job'})."
    return found


def multirun_results(folder: Path) -> Results | None:
    """The finished jobs as a sweep's results. None if there are fewer than two, if the choices are not Hydra's own, or
    if two jobs differ in nothing that is compared.

    Only Hydra's own launcher runs the jobs one after the other: with another none ran alone.
    """
    jobs = _choices(folder)
    timing = "exclusive" if _target(folder, "launcher").endswith(".BasicLauncher") else "shared"
    rows = []
    for number, choices in enumerate(jobs):
        compared = {key: value for key, value in choices.items() if key != "seed" and not _ignored(key)}
        name = f"{number} ({', '.join(f'{key}={value}' for key, value in choices.items())})"
        row = {"name": name, "folder": str(number), "part": "", "timing": timing, "choices": compared}
        rows.append(row | _end(folder / str(number)))
    done = [row for row in rows if row["state"] == "done"]
    kinds = {(*sorted(row["choices"].items()), row["seed"]) for row in done}
    if len(done) < 2 or len(kinds) < len(done):
        return None
    # Hydra does not alternate the configurations, so a pair of one seed is not called alternated.
    found = results_of(folder, {"name": f"{folder.resolve().parent.name}/{folder.resolve().name}", "jobs": rows})
    return replace(found, pair="seed")


def _end(run: Path) -> dict[str, Any]:
    """How a job ended, with its config."""
    summary = read_summary(run)
    config = read_yaml(run / CONFIG_FILE) if summary is not None else None
    if summary is None or config is None:
        return {"state": "without a result", "seed": None, "config": {}}
    return {"state": str(summary.get("exit_reason")), "seed": config.get("seed"), "config": config}


def _ignored(key: str) -> bool:
    return key.partition(".")[0] in WITHOUT_EFFECT or key.startswith("hydra")


def _choices(folder: Path) -> list[dict[str, str]]:
    """The settings of each job that are not all jobs', in Hydra's order; empty if the jobs' folders have other names,
    or another sweeper than Hydra's made the choices."""
    from asyncrlhf.config.compose import sweep_jobs

    try:
        settings = (read_yaml(folder / MULTIRUN_FILE) or {})["hydra"]
        overrides = [str(override) for override in settings["overrides"]["task"]]
        plain = settings["sweep"]["subdir"] == "${hydra.job.num}"
        if not plain or not _target(folder, "sweeper").endswith(".BasicSweeper"):
            return []
        if any(override.startswith("run_dir=") for override in overrides):
            return []
        jobs = sweep_jobs(overrides)
    except (ConfigError, LookupError, TypeError):
        return []
    same = set(jobs[0]).intersection(*jobs)
    return [{key: value for key, _, value in (o.partition("=") for o in job if o not in same)} for job in jobs]


def _target(folder: Path, part: str) -> str:
    """The class of Hydra's ``sweeper`` or ``launcher``; empty if the file does not say."""
    try:
        return str((read_yaml(folder / MULTIRUN_FILE) or {})["hydra"][part]["_target_"])
    except (ConfigError, LookupError, TypeError):
        return ""
