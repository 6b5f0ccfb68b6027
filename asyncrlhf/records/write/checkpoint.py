"""Checkpoints: all state that a run needs to continue with the same totals, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrlhf.data.checkpoint_manifest import check_manifest, fsync, read_json, write_manifest
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.records.write.record_marker import RecordMarker
from asyncrlhf.records.write.saved_rollouts import read_rollouts
from asyncrlhf.types import Rollout
from asyncrlhf.validation import check

FOLDER = "checkpoints"
STATE_FILE, ROLLOUTS_FILE, LEARNER_FOLDER = "controller.json", "rollouts.arrow", "learner"
FORMAT = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """A checkpoint read back: the controller's state, the finished rollouts by id, and the learner's folder."""

    folder: Path
    state: dict[str, Any]
    rollouts: dict[int, Rollout]
    marker: RecordMarker

    @property
    def learner(self) -> Path:
        return self.folder / LEARNER_FOLDER

    @property
    def step(self) -> int:
        return int(self.state["version"])


class CheckpointWriter:
    """Builds ``checkpoints/step-N`` under a temporary name and renames it when all of it is on disk."""

    def __init__(self, run_dir: Path, step: int, keep: int) -> None:
        self._parent = run_dir / FOLDER
        self._target = self._parent / f"step-{step:08d}"
        self._keep = keep
        self.folder = self._parent / f".step-{step:08d}.tmp"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.learner.mkdir(parents=True)

    @property
    def learner(self) -> Path:
        return self.folder / LEARNER_FOLDER

    @property
    def rollouts(self) -> Path:
        """The file for the finished rollouts, see :func:`~asyncrlhf.records.write.saved_rollouts.write_rollouts`."""
        return self.folder / ROLLOUTS_FILE

    def commit(self, state: Mapping[str, Any], marker: RecordMarker, seals: Mapping[str, Any] | None = None) -> Path:
        """Write the controller's part and the manifest, then make the checkpoint visible. Remove the oldest beyond
        ``keep``, and all of later steps: the run went back behind them and repeats these steps.

        ``seals``: digests of files of ``learner/`` that are on disk already, by their paths within it.
        """
        document = {"format": FORMAT, "marker": asdict(marker), **state}
        with (self.folder / STATE_FILE).open("w", encoding="utf-8") as file:
            file.writelines(_pieces(document))
        known = {f"{LEARNER_FOLDER}/{name}": facts for name, facts in (seals or {}).items()}
        write_manifest(self.folder, known)
        for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            fsync(folder)
        shutil.rmtree(self._target, ignore_errors=True)
        os.replace(self.folder, self._target)
        fsync(self._parent)
        found = list_checkpoints(self._parent.parent)
        own = found.index(self._target)
        for old in (*found[: max(0, own + 1 - self._keep)], *found[own + 1 :]):
            shutil.rmtree(old)
        return self._target


def _pieces(value: Any, depth: int = 3) -> Iterator[str]:
    """JSON text in pieces: one call of json.dumps would block the event loop for its whole duration."""
    if not depth or not value or not isinstance(value, (dict, list)):
        yield json.dumps(value)
        return
    named = isinstance(value, dict)
    yield "{" if named else "["
    for number, item in enumerate(value):
        yield ", " if number else ""
        if named:
            yield f"{json.dumps(str(item))}: "
        yield from _pieces(value[item] if named else item, depth - 1)
    yield "}" if named else "]"


def sweep_unfinished(run_dir: Path) -> None:
    """Remove unfinished checkpoints of a process that died while writing. The caller holds the run's lock."""
    for folder in (run_dir / FOLDER).glob(".*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def list_checkpoints(run_dir: Path, last_file: str = STATE_FILE) -> list[Path]:
    """Finished checkpoints of a run, oldest first: those with the file ``last_file`` (empty: all)."""
    found = (folder for folder in (run_dir / FOLDER).glob("[!.]*-*") if (folder / last_file).exists())
    numbered = (folder for folder in found if folder.name.rpartition("-")[2].isdecimal())
    return sorted(numbered, key=lambda folder: int(folder.name.rpartition("-")[2]))


def find_checkpoints(resume: str, run_dir: Path | None, runs: Path, last_file: str = "", stage: str = "") -> list[Path]:
    """The checkpoints that ``checkpoint.resume`` selects, newest first: those of one run, or the one whose folder it
    names. Empty if ``auto`` finds none.

    ``auto`` looks in ``run_dir`` if one is given, else in the newest run of ``runs`` (``runs/<name>``) that has one. A
    stage other than ``train`` gives its name and the file that is written last in its checkpoints.
    """
    if resume == "no":
        return []
    if resume != "auto":
        folder = Path(resume)
        found = [folder] if (folder / (last_file or STATE_FILE)).is_file() else list_checkpoints(folder, last_file)
        what = f"checkpoint of {stage}" if stage else "checkpoint"
        check(found, f"checkpoint.resume={resume} holds no {what}; allowed: no, auto, or a checkpoint's folder.")
        return found[-1:]
    candidates = [run_dir] if run_dir is not None else sorted(runs.glob("*"), reverse=True)
    return next((found[::-1] for run in candidates if (found := list_checkpoints(run, last_file))), [])


def newest_whole(found: Sequence[Path], read: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    """The result of ``read`` for the first of ``found`` that it accepts, and one sentence per checkpoint that was
    skipped. None if ``found`` is empty; raises ConfigError with the first sentence if ``read`` refuses all.

    ``read`` raises CheckpointError for a checkpoint that is not whole. If the user named a folder, no other is tried.
    """
    refused: list[str] = []
    for folder in found:
        try:
            return read(folder), [f"{why} The run resumes from {folder.name}." for why in refused]
        except CheckpointError as error:
            refused.append(f"Passed over {str(error).rstrip('.')}.")
    if refused:
        raise ConfigError(f"checkpoint.resume finds no whole checkpoint: {refused[0].removeprefix('Passed over ')}")
    return None, []


def read_checkpoint(folder: Path) -> Saved:
    """Raises CheckpointError for a checkpoint that is incomplete, damaged or of another format."""
    check_manifest(folder)
    state = read_json(folder / STATE_FILE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint {folder} has format {state.get('format')}; this version reads {FORMAT}.")
    version = state.get("version")
    if type(version) is not int or version < 0:
        raise CheckpointError(f"{folder / STATE_FILE} has version={version!r:.80}; a count of 0 or more was written.")
    marker = RecordMarker.of(state.pop("marker", None), folder / STATE_FILE)
    return Saved(folder, state, read_rollouts(folder / ROLLOUTS_FILE), marker)
