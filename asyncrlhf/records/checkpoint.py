"""Checkpoints: everything a run needs to go on with the totals it had, written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrlhf.errors import CheckpointError
from asyncrlhf.records.recorder import RecordMarker
from asyncrlhf.types import Rollout
from asyncrlhf.validation import check

FOLDER = "checkpoints"
STATE_FILE, ROLLOUTS_FILE, LEARNER_FOLDER = "controller.json", "rollouts.pkl", "learner"
FORMAT = 3


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
    """Builds ``checkpoints/step-N`` under a temporary name; it gets its name when all of it is on disk."""

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

    def commit(self, state: dict[str, Any], rollouts: dict[int, Rollout], marker: RecordMarker) -> Path:
        """Write the controller's part, then make the checkpoint visible and remove the oldest beyond ``keep``."""
        with (self.folder / ROLLOUTS_FILE).open("wb") as file:
            pickle.dump(rollouts, file, protocol=5)
        document = {"format": FORMAT, "marker": asdict(marker), **state}
        (self.folder / STATE_FILE).write_text(json.dumps(document))
        for path in self.folder.rglob("*"):
            if path.is_file():
                _fsync(path)
        shutil.rmtree(self._target, ignore_errors=True)
        os.replace(self.folder, self._target)
        _fsync(self._parent)
        for old in list_checkpoints(self._parent.parent)[: -self._keep]:
            shutil.rmtree(old)
        return self._target


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_checkpoints(run_dir: Path, last_file: str = STATE_FILE) -> list[Path]:
    """Complete checkpoints of a run, oldest first: those that hold ``last_file``, which is written last."""
    found = (file.parent for file in (run_dir / FOLDER).glob(f"[!.]*-*/{last_file}"))
    return sorted(found, key=lambda folder: int(folder.name.rpartition("-")[2]))


def find_checkpoint(
    resume: str, run_dir: Path | None, runs: Path, last_file: str = STATE_FILE, stage: str = ""
) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means, or None when ``auto`` finds nothing to go on with.

    ``auto`` looks in ``run_dir`` where one is given, else in the newest run of ``runs`` (``runs/<name>``) that has one.
    A stage that is not ``train`` gives its name and the file that is written last in its checkpoints.
    """
    if resume == "no":
        return None
    if resume != "auto":
        folder = Path(resume)
        found = [folder] if (folder / last_file).is_file() else list_checkpoints(folder, last_file)
        what = f"checkpoint of {stage}" if stage else "checkpoint"
        check(found, f"checkpoint.resume={resume} holds no {what}; allowed: no, auto, or a checkpoint's folder.")
        return found[-1]
    candidates = [run_dir] if run_dir is not None else sorted(runs.glob("*"))
    every = [checkpoint for run in candidates for checkpoint in list_checkpoints(run, last_file)]
    return every[-1] if every else None


def read_checkpoint(folder: Path) -> Saved:
    """Raises CheckpointError for a checkpoint that is torn or of another format."""
    try:
        state = json.loads((folder / STATE_FILE).read_text())
        with (folder / ROLLOUTS_FILE).open("rb") as file:
            rollouts = pickle.load(file)
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint {folder} has format {state.get('format')}; this version reads {FORMAT}.")
    return Saved(folder, state, rollouts, RecordMarker(**state.pop("marker")))
