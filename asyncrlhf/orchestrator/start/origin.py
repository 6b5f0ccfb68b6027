"""Where a run starts: from a checkpoint, under settings that may have changed, or from the beginning, in a folder that
may hold records of attempts that ended before their first checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrlhf.config.drift import Change, drift, told
from asyncrlhf.config.inputs import digests
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.records.write.attempts import add_attempt, read_attempts
from asyncrlhf.records.write.checkpoint import Saved
from asyncrlhf.records.write.record_marker import RecordMarker, is_used, recorded_steps
from asyncrlhf.records.write.recorder import read_summary
from asyncrlhf.validation import check


@dataclass(frozen=True)
class Origin:
    """``marker``: how much of the folder's records the run keeps; None: the folder must hold none. ``changes``: the
    settings that differ from the checkpoint's. ``inputs``: digests of the files that settings name. ``said``: a
    sentence for the user, or empty. ``after``: how the attempt before ended."""

    step: int = 0
    marker: RecordMarker | None = None
    changes: Sequence[Change] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    after: str = "killed, without a summary"

    def note(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Add this attempt to the folder's list of attempts."""
        changes = [str(change) for change in self.changes]
        add_attempt(run_dir, self.step, settings, self.inputs, changes, self.after)


def find_origin(config: RunConfig, run_dir: Path, saved: Saved | None) -> Origin:
    """Raises ConfigError, with all differences in one message, if the run cannot continue from ``saved``."""
    found = _found(config, run_dir, saved)
    return replace(found, after=(read_summary(run_dir) or {}).get("exit_reason", found.after))


def _found(config: RunConfig, run_dir: Path, saved: Saved | None) -> Origin:
    inputs = digests(config)
    if saved is None:
        return _begin(config, run_dir, inputs)
    own = saved.folder.parent.parent
    check(
        run_dir.resolve() == own.resolve(),
        f"checkpoint.resume={config.checkpoint.resume} is a checkpoint of the run in {own}, which continues there, "
        f"not in run_dir={run_dir}; leave run_dir out.",
    )
    held: dict[str, str] = next((row["inputs"] for row in read_attempts(run_dir)), {})
    before = saved.state.get("config")  # None: written by an older version
    changes = [] if before is None else drift(before, config, step=saved.step, held=held, found=inputs)
    return Origin(saved.step, saved.marker, changes, inputs, told(changes, saved.folder))


def _begin(config: RunConfig, run_dir: Path, inputs: Mapping[str, str]) -> Origin:
    """Start from the beginning; under ``checkpoint.resume=auto`` also in a folder without a checkpoint of its run."""
    if config.checkpoint.resume != "auto" or not is_used(run_dir):
        return Origin(inputs=inputs)
    check(
        (read_summary(run_dir) or {}).get("exit_reason") != "done",
        f"run_dir={run_dir} holds a finished run without a checkpoint to continue from; give another run_dir.",
    )
    said = (
        f"{run_dir} has no checkpoint to continue from: the run starts anew and removes the records of "
        f"{recorded_steps(run_dir)} learner steps of an earlier attempt."
    )
    return Origin(marker=RecordMarker(), inputs=inputs, said=said)
