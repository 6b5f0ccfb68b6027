"""Which records of a run belong to a checkpoint, whether they exist, and how later ones are removed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.records.spans import SPANS_FOLDER

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FOLDER = "rollouts"


@dataclass(frozen=True)
class RecordMarker:
    """How many of the records belong to a checkpoint; the default's zeros mean a run's beginning.

    ``dataclasses.asdict`` makes it JSON, :meth:`of` reads it back.
    """

    metrics_lines: int = 0
    parts: int = 0
    span_parts: int = 0
    journal: int = 0  # lines

    @classmethod
    def of(cls, counts: Any, where: Path) -> RecordMarker:
        """Read a marker back; raises CheckpointError, naming the place ``where``, if ``counts`` are not a marker's."""
        try:
            marker = cls(**counts)
        except TypeError:
            raise CheckpointError(f"{where} holds no marker of records: {counts!r:.80}.") from None
        for name, count in vars(marker).items():
            if type(count) is not int or count < 0:
                raise CheckpointError(f"{where} has {name}={count!r:.80}; a count of 0 or more was written.")
        return marker


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def is_used(run_dir: Path) -> bool:
    """Whether the folder holds records of a run."""
    metrics = run_dir / METRICS_FILE
    return (metrics.exists() and metrics.stat().st_size > 0) or any(run_dir.glob(f"{ROLLOUTS_FOLDER}/*.parquet"))


def recorded_steps(run_dir: Path) -> int:
    """Learner steps in metrics.jsonl, without an incomplete last line."""
    path = run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def refuse_used_folder(run_dir: Path) -> None:
    """Raise ConfigError for a folder that already holds a run."""
    if is_used(run_dir):
        raise ConfigError(
            f"run_dir={run_dir} already holds a run; give another run_dir, or checkpoint.resume=auto to continue it."
        )


def check_records(run_dir: Path, marker: RecordMarker) -> None:
    """Raise CheckpointError, in one sentence, unless ``run_dir`` holds the records that ``marker`` counts: lines of
    JSON, and complete parts. Changes nothing."""
    metrics = run_dir / METRICS_FILE
    try:
        for number, line in enumerate(_counted_lines(metrics, marker.metrics_lines)[1], start=1):
            if not isinstance(json.loads(line), dict):
                raise CheckpointError(f"{metrics} line {number}, which the checkpoint counts on, is no JSON object.")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{metrics}, which the checkpoint counts on, cannot be read: {error}.") from error
    counted = {ROLLOUTS_FOLDER: marker.parts, SPANS_FOLDER: marker.span_parts}
    for path in (run_dir / folder / part_name(i) for folder, parts in counted.items() for i in range(parts)):
        try:
            pq.read_metadata(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}, which the checkpoint counts on, cannot be read: {error}.") from error


def _counted_lines(path: Path, lines: int) -> tuple[int, list[bytes]]:
    """The size of the file, and its first ``lines``; raises CheckpointError if it has fewer complete lines."""
    content = path.read_bytes() if path.exists() else b""
    kept = content.splitlines(keepends=True)[:lines]
    if len(kept) < lines or not all(line.endswith(b"\n") for line in kept):
        raise CheckpointError(f"{path} has {len(kept)} lines but the checkpoint was made after {lines}.")
    return len(content), kept


def cut_metrics(path: Path, lines: int) -> None:
    whole, kept = _counted_lines(path, lines)
    size = sum(len(line) for line in kept)
    if size < whole:
        os.truncate(path, size)


def cut_parts(folder: Path, parts: int) -> None:
    keep = {part_name(number) for number in range(parts)}
    missing = sorted(name for name in keep if not (folder / name).exists())
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}, which the checkpoint counts on.")
    for path in [*folder.glob("part-*.parquet"), *folder.glob("part-*.tmp")]:
        if path.name not in keep:
            path.unlink()
