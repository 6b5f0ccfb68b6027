"""Which records of a run belong to a checkpoint, with size and hash; whether they are there, and how later ones are
removed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from asyncrlhf.data.checkpoint_manifest import LinesSeal, Seals, damages, seal
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.rollout_rows import ROLLOUTS_FOLDER
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.records.write.spans import SPANS_FOLDER
from asyncrlhf.records.write.thinning import is_thin

METRICS_FILE = "metrics.jsonl"
_PART = re.compile(rf"({ROLLOUTS_FOLDER}|{SPANS_FOLDER})/part-([0-9]{{5,18}})\.parquet")
_TOKENS_PART = re.compile(rf"{TOKENS_FOLDER}/steps-[0-9]{{7,18}}-([0-9]{{7,18}})-rank-[0-9]{{1,18}}\.parquet")


@dataclass(frozen=True)
class RecordMarker:
    """How many of the records belong to a checkpoint; the default's zeros mean a run's beginning.

    ``seals``: size and hash of each part, by its path within the run's folder, and of the first lines of the files of
    :attr:`lines`. ``dataclasses.asdict`` makes it JSON, :meth:`of` reads it back.
    """

    metrics_lines: int = 0
    parts: int = 0
    span_parts: int = 0
    journal: int = 0  # lines
    seals: Seals = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Any, where: Path) -> RecordMarker:
        """Read a marker back; raises CheckpointError, naming the place ``where``, if ``counts`` are not a marker's."""
        try:
            marker = cls(**counts)
        except TypeError:
            raise CheckpointError(f"{where} holds no marker of records: {counts!r:.80}.") from None
        for name, count in vars(marker).items():
            if name != "seals" and (type(count) is not int or count < 0):
                raise CheckpointError(f"{where} has {name}={count!r:.80}; a count of 0 or more was written.")
        if not isinstance(marker.seals, dict):
            raise CheckpointError(f"{where} has seals={marker.seals!r:.80}; an object was written.")
        for name, facts in marker.seals.items():
            if not isinstance(facts, dict) or not (name in marker.lines or marker.counts_on(name)):
                raise CheckpointError(f"{where} has a seal of {name!r:.80}, which is no record that it counts.")
        counted = chain((name for name, lines in marker.lines.items() if lines), marker.part_names())
        if unsealed := next((name for name in counted if name not in marker.seals), ""):
            raise CheckpointError(f"{where} has no seal of {unsealed}; every record that it counts has one.")
        return marker

    @property
    def lines(self) -> dict[str, int]:
        """The lines that it counts, by the name of their file."""
        return {METRICS_FILE: self.metrics_lines, JOURNAL_FILE: self.journal}

    def part_names(self) -> Iterator[str]:
        """The paths, within the run's folder, of the numbered parts that it counts."""
        for folder, parts in ((ROLLOUTS_FOLDER, self.parts), (SPANS_FOLDER, self.span_parts)):
            yield from (f"{folder}/{part_name(number)}" for number in range(parts))

    def counts_on(self, name: str) -> bool:
        """Whether the path within the run's folder is that of a part up to the marker."""
        if part := _PART.fullmatch(name):
            return int(part[2]) < (self.parts if part[1] == ROLLOUTS_FOLDER else self.span_parts)
        tokens = _TOKENS_PART.fullmatch(name)
        return tokens is not None and int(tokens[1]) <= self.metrics_lines


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
    """Raise CheckpointError, in one sentence, unless ``run_dir`` holds the lines and parts that ``marker`` counts,
    unchanged. Changes nothing."""
    for name, lines in marker.lines.items():
        check_lines(run_dir / name, lines, marker.seals.get(name, {}))
    for name, said in changed(run_dir, {n: facts for n, facts in marker.seals.items() if n not in marker.lines}):
        raise CheckpointError(f"{run_dir / name}, which the checkpoint counts on, {said}.")


def changed(run_dir: Path, sealed: Seals) -> list[tuple[str, str]]:
    """As :func:`~asyncrlhf.data.checkpoint_manifest.damages`; a part that was thinned since is none."""
    left = dict(sealed)
    while found := damages(run_dir, left):  # first of other sizes, then of other contents
        thin = {name for name, _ in found if is_thin(run_dir / name, sealed[name])}
        if not thin:
            return found
        left = {name: facts for name, facts in left.items() if name not in thin}
    return []


def check_lines(path: Path, lines: int, facts: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the file's first ``lines`` lines are there, and fit their seal ``facts``."""
    if not lines:
        return
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}, which the checkpoint counts on, is not a plain file.")
    found, digest = 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            for line in islice(file, lines):
                found += line.endswith(b"\n")
                digest.update(line)
    except OSError as error:
        raise CheckpointError(f"{path}, which the checkpoint counts on, cannot be read: {error}.") from error
    if found < lines:
        raise CheckpointError(f"{path} has {found} lines but the checkpoint was made after {lines}.")
    if digest.hexdigest() != facts.get("sha256"):
        raise CheckpointError(f"{path} has changed in the {lines} lines after which the checkpoint was made.")


def cut_metrics(path: Path, lines: int) -> None:
    """Cut the file after its first ``lines``; raises CheckpointError if it has fewer complete lines."""
    content = path.read_bytes() if path.exists() else b""
    kept = content.splitlines(keepends=True)[:lines]
    if len(kept) < lines or not all(line.endswith(b"\n") for line in kept):
        raise CheckpointError(f"{path} has {len(kept)} lines but the checkpoint was made after {lines}.")
    size = sum(len(line) for line in kept)
    if size < len(content):
        os.truncate(path, size)


def cut_parts(folder: Path, parts: int) -> None:
    keep = {part_name(number) for number in range(parts)}
    missing = sorted(name for name in keep if not (folder / name).exists())
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}, which the checkpoint counts on.")
    for path in [*folder.glob("part-*.parquet"), *folder.glob("part-*.tmp")]:
        if path.name not in keep:
            path.unlink()


class RecordSeals:
    """The seals of a run's records, by their paths within its folder. Parts and lines change only by a rollback, which
    calls :meth:`forget_after`. Not thread-safe."""

    def __init__(self, run_dir: Path, known: Seals) -> None:
        self._run_dir = run_dir
        self._known = dict(known)
        self._lines: dict[str, LinesSeal] = {}  # by file

    def of(self, marker: RecordMarker) -> Seals:
        """The seals of lines and parts that ``marker`` counts, and of ``rollout_tokens/`` up to its step. Reads only
        those without a seal, which must be complete, and brings the parts to disk."""
        tokens = (self._run_dir / TOKENS_FOLDER).glob("steps-*.parquet")
        names = {*marker.part_names(), *(f"{TOKENS_FOLDER}/{path.name}" for path in tokens)}
        new = sorted(name for name in names - self._known.keys() if marker.counts_on(name))
        self._known |= seal(self._run_dir, (self._run_dir / name for name in new))
        found = {name: facts for name, facts in self._known.items() if marker.counts_on(name)}
        for name, lines in marker.lines.items():
            if lines:
                found[name] = self._lines.setdefault(name, LinesSeal(self._run_dir / name)).of(lines)
        return found

    def forget_after(self, marker: RecordMarker) -> None:
        """Forget what ``marker`` does not count, which is removed or written again. The journal keeps its lines."""
        self._lines.pop(METRICS_FILE, None)
        self._known = {name: facts for name, facts in self._known.items() if marker.counts_on(name)}
