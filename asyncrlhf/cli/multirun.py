"""``asyncrlhf train -m`` and the flags of Hydra's own command line: Hydra composes, launches and names the folders."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from asyncrlhf.cli.main import ended_by
from asyncrlhf.cli.one_run import draw, run
from asyncrlhf.config.compose import CONFIG_NAME, compose_config, search_path_override, sweep_jobs
from asyncrlhf.config.conversion import conf_folder, from_hydra, register_schema
from asyncrlhf.errors import ContradictionError
from asyncrlhf.last_words import by_signal
from asyncrlhf.redaction import redact


def check_jobs(overrides: Sequence[str], folder: Path | None) -> int:
    """Check every job's config before the first one starts; returns their number, 0 if another sweeper than Hydra's
    makes them. Jobs with contradicting settings are left out at their turn, if others remain."""
    if any(override.lstrip("+").startswith("hydra/sweeper") for override in overrides):
        return 0
    jobs = sweep_jobs(overrides)
    contradictions = []
    for job in jobs:
        try:
            from_hydra(compose_config(job, folder))
        except ContradictionError as error:
            contradictions.append(error)
    if len(contradictions) == len(jobs):
        raise contradictions[0]
    return len(jobs)


def with_hydra(flags: Sequence[str], overrides: Sequence[str], folder: Path | None, jobs: int | None = None) -> int:
    """Hydra's command line; returns the exit code of the worst job of a multirun, 0 without one. A failed job does not
    affect the others; an interruption ends them all. ``jobs``: their number, None if this is no multirun.

    A launcher may run the jobs in other processes, so each writes how it ended to a file in one folder below the
    current one, which all of them can reach.
    """
    register_schema()
    each = [set(job) for job in sweep_jobs(overrides)] if jobs else [set[str]()]
    varied = {override.partition("=")[0] for override in each[0].union(*each) - each[0].intersection(*each)}
    ends = tempfile.mkdtemp(prefix=".multirun-", dir=Path.cwd()) if jobs is not None else ""

    @hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=CONFIG_NAME)
    def job(config: DictConfig) -> int:
        context = HydraConfig.get()
        end: dict[str, Any] = {"name": context.job.override_dirname, "sweep": context.sweep.dir, "code": 1, "run": ""}
        if jobs is not None:
            own = " ".join(o for o in context.overrides.task if not jobs or o.partition("=")[0] in varied)
            print(f"\nJob {int(context.job.num) + 1}{f' of {jobs}' if jobs else ''}: {own}", flush=True)
        try:
            _one_job(config, Path(context.runtime.output_dir), end)
        finally:
            if ends:
                (Path(ends) / f"{context.job.num}.json").write_text(json.dumps(end), encoding="utf-8")
        return int(end["code"])

    before = sys.argv
    sys.argv = ["asyncrlhf train", *flags, *search_path_override(folder), *overrides]
    try:
        job()
    finally:
        sys.argv = before
        found = _read_ends(Path(ends)) if ends else []
        _report(found)
    codes = [int(end["code"]) for end in found]
    if jobs and len(codes) < jobs:
        print(f"asyncrlhf: {jobs - len(codes)} of the {jobs} jobs ended without a result.", file=sys.stderr)
        codes.append(1)
    return max(codes, default=0)


def _one_job(config: DictConfig, output: Path, end: dict[str, Any]) -> None:
    """Train, and write the exit code and the run directory into ``end``."""
    with open_dict(config):
        config.run_dir = config.run_dir or str(output)
    try:
        built = from_hydra(config)
        end["code"] = run(built)
        end["run"] = built.run_dir if built.logging.report else ""
    except ContradictionError as error:
        print(f"Left out: {end['name']}: {error}")
        end["code"] = 0
    except KeyboardInterrupt:
        end["code"] = by_signal()
        raise
    except Exception as error:  # it is this job's end and no other's
        end["code"] = ended_by(error, f"{end['name']}: ", output)
    finally:
        with suppress(OSError):
            output.rmdir()  # Hydra's folder, empty if the job did not start
    if end["code"] > 128:
        raise KeyboardInterrupt


def _read_ends(folder: Path) -> list[dict[str, Any]]:
    """How the jobs ended, in Hydra's order; removes the folder."""
    files = sorted(folder.glob("*.json"), key=lambda file: int(file.stem))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _report(ends: Sequence[dict[str, Any]]) -> None:
    """Draw one report of the finished jobs, and keep secrets out of what Hydra wrote itself."""
    for file in {Path(end["sweep"]) / "multirun.yaml" for end in ends}:
        if file.is_file():
            file.write_text(redact(file.read_text(encoding="utf-8")), encoding="utf-8")
    done = [Path(end["run"]) for end in ends if end["run"] and end["code"] == 0]
    if len(done) < 2:
        return
    print(draw(done, done[0].parent / "report"))
