"""``sweep.json``: a sweep's jobs, the result of each attempt, and the code and data that the sweep started with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrlhf import __version__
from asyncrlhf.config.compose import quoted
from asyncrlhf.config.conversion import conf_folder, to_plain
from asyncrlhf.config.inputs import digest_of, named_files
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.summary import git_state
from asyncrlhf.records.write.checkpoint import list_checkpoints
from asyncrlhf.records.write.recorder import read_summary
from asyncrlhf.records.write.run_lock import RunLock
from asyncrlhf.records.write.whole_files import write_atomically
from asyncrlhf.redaction import redacted
from asyncrlhf.sweeps.job import Job, JobRecord
from asyncrlhf.sweeps.plan import SweepPlan

SWEEP_FILE, JOBS_FOLDER = "sweep.json", "jobs"
FORMAT = 1
PACKAGE = Path(__file__).resolve().parents[1]


class SweepRecord:
    """Owns ``sweep.json`` of one folder; every change is on disk before the call returns."""

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        self.folder = folder
        self._head = {
            "format": FORMAT,
            "name": plan.name,
            "overrides": list(plan.overrides),
            "git": git_state(PACKAGE),
            "version": __version__,
            "source": _source(),
            "data": _data(plan),
        }
        self._search = plan.search
        self.jobs: dict[str, JobRecord] = {}
        self.add(plan.jobs)

    def join(self, accept_changed: bool) -> None:
        """Read the record that an earlier command left in the folder. Raises ConfigError if code or data differ from
        those of the finished jobs, unless ``accept_changed``."""
        path = self.folder / SWEEP_FILE
        if not path.is_file():
            self.save()
            return
        before = read_sweep(self.folder)
        if self._search is not None:
            self._search.restore(before.get("search", {}).get("trials", []))
            self.add(self._search.jobs)
        changed = _changes(before, self._head)
        if changed and not accept_changed and any(job["state"] == "done" for job in before["jobs"]):
            raise ConfigError(
                f"{self.folder} has finished jobs of {changed}; give --accept-changed to continue it all the same, "
                "or another sweep.name for a new sweep."
            )
        for row in before["jobs"]:
            job = self.jobs.get(row["hash"])
            if job is not None:
                job.state, job.attempts, job.folder = row["state"], row["attempts"], row["folder"]
                job.seconds, job.note = row["seconds"], row["note"]
                self._look_again(job)
        self.save()

    def add(self, jobs: Sequence[Job]) -> None:
        """Add the new jobs of a search; known jobs are not changed."""
        for job in jobs:
            self.jobs.setdefault(job.hash, _new_record(job))

    def _look_again(self, job: JobRecord) -> None:
        """A command that was killed left the state ``running``: take the state from the job's own summary."""
        if job.state == "running":
            job.state = after_a_kill(self.folder / job.folder)
            job.note = "" if job.state == "done" else "the sweep was killed while it ran"
        summary = read_summary(self.folder / job.folder) if job.folder else None
        if job.state == "done" and summary is None:
            job.state, job.note = "pending", ""  # its folder was removed

    def begin(self, job: JobRecord) -> list[str]:
        """Mark an attempt as begun; returns the overrides that the run needs in addition to the job's. An interrupted
        attempt continues from its newest checkpoint; without one the next attempt gets a new folder."""
        resumed = bool(job.folder) and bool(list_checkpoints(self.folder / job.folder))
        if not resumed:
            job.attempts += 1
            suffix = "" if job.attempts == 1 else f".attempt-{job.attempts}"
            job.folder = f"{JOBS_FOLDER}/{job.name}{suffix}"
        job.state, job.note = "running", ""
        self.save()
        return [f"run_dir={quoted(str(self.folder / job.folder))}", f"checkpoint.resume={'auto' if resumed else 'no'}"]

    def end(self, job: JobRecord, state: str, seconds: float, note: str = "") -> None:
        job.state, job.seconds, job.note = state, seconds, note
        self.save()

    def save(self) -> None:
        search = {} if self._search is None else {"search": self._search.plain()}
        document = redacted({**self._head, **search, "jobs": [asdict(job) for job in self.jobs.values()]})
        write_atomically(self.folder / SWEEP_FILE, json.dumps(document, indent=1) + "\n")


def _new_record(job: Job) -> JobRecord:
    facts = (job.name, job.hash, job.part, job.timing, job.choices, job.seed, list(job.overrides))
    return JobRecord(*facts, config=to_plain(job.config))


def _data(plan: SweepPlan) -> dict[str, str]:
    """Digests of the local files that the jobs read, by ``setting=path``."""
    paths = {f"{key}={path}": path for config in plan.configs for key, path in named_files(config)}
    return {name: digest for name, path in paths.items() if (digest := digest_of(path))}


def _source() -> str:
    """A digest of this package's own code and config files, committed or not."""
    whole = hashlib.sha256()
    for folder in (PACKAGE, conf_folder()):
        for file in sorted(path for kind in ("*.py", "*.yaml") for path in folder.rglob(kind)):
            whole.update(f"{file.relative_to(folder)}/".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences as a part of a sentence; empty if there are none."""
    found = []
    if before["source"] != now["source"]:
        found.append(f"another state of the code ({_code(before)}, now {_code(now)})")
    found += [
        f"another content of {name}" for name, digest in before["data"].items() if now["data"].get(name) != digest
    ]
    return " and ".join(found)


def _code(head: Mapping[str, Any]) -> str:
    git = head["git"]
    place = "installed" if git is None else git["commit"][:9] + (" with changes" if git["dirty"] else "")
    return f"{head['version']} {place} {head['source']}"


def is_sweep(folder: Path) -> bool:
    return (Path(folder) / SWEEP_FILE).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """The document of ``sweep.json``. Raises ConfigError if this version cannot read it."""
    path = folder / SWEEP_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ConfigError(f"{path} has format {document['format']}; this version reads {FORMAT}.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); was it edited by hand?") from error
    return document


def after_a_kill(run_dir: Path) -> str:
    """The state of a job that a killed command left as ``running``."""
    return "done" if (read_summary(run_dir) or {}).get("exit_reason") == "done" else "interrupted"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock the sweep's folder within this context; a second command on it is refused meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder, "sweep.name")
    try:
        yield
    finally:
        lock.release()
