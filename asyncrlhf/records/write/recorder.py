"""Writes a run's directory: config.yaml, metrics.jsonl, journal.jsonl, rollouts and spans as Parquet, and summary.json.

A crash loses no metrics line, since each one is flushed as it is written. Rollout rows are written elsewhere (a thread,
an actor), in whole files that appear under their name only when complete. :meth:`RunRecorder.mark` returns a marker; a
recorder opened with that marker cuts everything written after it, so that a resumed run records each step once.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.errors import AsyncRLHFError, ConfigError, failure_sentence
from asyncrlhf.records.write.journal import JOURNAL_FILE, Journal
from asyncrlhf.records.write.record_marker import (
    METRICS_FILE,
    ROLLOUTS_FOLDER,
    RecordMarker,
    RecordSeals,
    cut_metrics,
    cut_parts,
    part_name,
    refuse_used_folder,
)
from asyncrlhf.records.write.rollout_rows import RolloutRow, undo_uses, write_part
from asyncrlhf.records.write.rollout_tokens import cut_tokens
from asyncrlhf.records.write.run_lock import RunLock
from asyncrlhf.records.write.spans import SPANS_FOLDER, SpanParts, SpanRow
from asyncrlhf.records.write.thinning import Thinning
from asyncrlhf.records.write.whole_files import naming, write_atomically, writing_to
from asyncrlhf.types import Payload

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
LINES = 1024  # of metrics.jsonl that are read at once
MAX_WAITING = 4  # parts that may wait for the disk before the run waits with them

# Writes (file, rows, where each row's rollout lies or None): see :func:`write_part`.
SubmitPart = Callable[[Path, Sequence[RolloutRow], Sequence[Payload | None]], Future[None]]


class RunRecorder:
    """Owns the files of ``run_dir``. ``log_step`` writes at once; ``record`` and ``mark`` pass rows to a writer and do
    no I/O. Not thread-safe, except that ``log_step`` and ``sync_metrics`` may run in one other thread.

    With ``resume_from`` the files are first cut back to that marker. Without it, a folder that already holds a run
    raises ConfigError, so that no run is overwritten by accident; so does a folder that another process writes.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        logging: LoggingConfig,
        resume_from: RecordMarker | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._logging = logging
        self._folder = self.run_dir / ROLLOUTS_FOLDER
        metrics_path = self.run_dir / METRICS_FILE
        with writing_to(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.run_dir)
        if resume_from is None:
            refuse_used_folder(self.run_dir)
            resume_from = RecordMarker()
        with writing_to(self.run_dir):
            self._folder.mkdir(parents=True, exist_ok=True)
            spans = self.run_dir / SPANS_FOLDER
            cut_parts(spans, resume_from.span_parts)
            cut_tokens(self.run_dir, resume_from.metrics_lines)
            cut_metrics(metrics_path, resume_from.metrics_lines)
            cut_parts(self._folder, resume_from.parts)
            (self.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
            text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
            write_atomically(self.run_dir / CONFIG_FILE, text)
            self._metrics = metrics_path.open("a", encoding="utf-8")
            self.journal = Journal(self.run_dir / JOURNAL_FILE, resume_from.journal)
        self._lines = resume_from.metrics_lines
        self._seals = RecordSeals(self.run_dir, resume_from.seals)
        keep = logging.keep_gib
        self._thinning = None if keep is None else Thinning(self.run_dir, keep * 2**30)
        self._elapsed = 0.0
        self._before_closing: Callable[[], None] = lambda: None
        self._rows: list[RolloutRow] = []
        self._payloads: list[Payload | None] = []
        self._parts = resume_from.parts  # numbers given out; on disk once they are no longer pending
        self._pending: deque[Future[None]] = deque()
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self.journal.full = self._write_journal
        self._submit: SubmitPart = lambda target, rows, _: self._pool.submit(write_part, target, rows)
        self._spans = SpanParts(spans, logging.flush_every, resume_from.span_parts, self._pool.submit)

    def write_with(self, submit: SubmitPart) -> None:
        """Write all further parts by ``submit``, which returns at once. The default is a thread, for complete rows."""
        self._submit = submit

    def before_closing(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when the recorder closes, for records that arrive while the run's parts end."""
        self._before_closing = tell

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; NaN and infinity become null. Raises ValueError without a ``step``."""
        if "step" not in metrics:
            raise ValueError(f"a line of {METRICS_FILE} needs a step; got {sorted(metrics)}")
        line = json.dumps(plain(metrics), allow_nan=False) + "\n"
        self.journal.write()  # first, so that the journal has every recorded step
        try:
            self._metrics.write(line)
            self._metrics.flush()
        except OSError as error:
            raise naming(error, self.run_dir / METRICS_FILE) from error
        self._lines += 1

    def record(self, rows: Sequence[RolloutRow], payloads: Sequence[Payload | None] | None = None) -> None:
        """Keep rows for the next Parquet part; ``payloads``: where each row's rollout lies, or None. Raises an earlier
        error of the writer."""
        if not self._logging.rollouts:
            return
        self._rows.extend(rows)
        self._payloads.extend(payloads if payloads is not None else [None] * len(rows))
        while len(self._rows) >= self._logging.flush_every:
            self._put(self._logging.flush_every)

    def mark(self) -> RecordMarker:
        """Put all rows so far in numbered parts; returns the position. They are on disk once the ``unwritten`` are
        done."""
        self._put(len(self._rows))
        self._pending += self._spans.put(self._elapsed)
        lines = self.journal.mark()
        return RecordMarker(self._lines, self._parts, self._spans.parts, lines)

    def sealed(self, marker: RecordMarker) -> RecordMarker:
        """The marker with the seals of all that it counts on, which must be on disk. Blocks; not during a rollback.
        Thins old records, if there are too many."""
        marker = replace(marker, seals=self._seals.of(marker))
        if self._thinning is not None:
            self._thinning.apply(marker.seals)
        return marker

    def rewind(self, marker: RecordMarker) -> None:
        """Undo the records of steps and rollouts after ``marker``, as a recorder opened with it does. The journal keeps
        its lines, and the spans stay: time does not go back."""
        self._rows, self._payloads = [], []
        self._cut_steps(marker)
        cut_parts(self._folder, marker.parts)
        self._parts = marker.parts

    def undo_training(self, marker: RecordMarker, version: int, returned: Collection[int]) -> None:
        """Undo the records of steps after ``marker``; of rollouts only the uses at ``version`` and later, and the rows
        of those that ``returned`` to the buffer."""
        self._cut_steps(marker)
        for number in range(marker.parts, self._parts):
            undo_uses(self._folder / part_name(number), version, returned)

    def _cut_steps(self, marker: RecordMarker) -> None:
        wait(self._pending)
        self.raise_if_failed()
        self._seals.forget_after(marker)
        cut_tokens(self.run_dir, marker.metrics_lines)
        cut_metrics(self.run_dir / METRICS_FILE, marker.metrics_lines)
        self._lines = marker.metrics_lines

    def record_spans(self, rows: Sequence[SpanRow], elapsed: float) -> None:
        """Keep spans for the next Parquet part, which holds none that ended after ``elapsed`` seconds of the run."""
        self._elapsed = elapsed
        self._pending += self._spans.add(rows, elapsed)

    def _write_journal(self) -> None:
        self._pool.submit(self.journal.write)

    def unwritten(self, allowed: int = 0) -> list[Future[None]]:
        """The parts to wait for until at most ``allowed`` parts are unwritten."""
        return list(self._pending)[: max(0, len(self._pending) - allowed)]

    def raise_if_failed(self) -> None:
        """Forget the parts that are written; raises AsyncRLHFError if any part failed to be written."""
        while self._pending and self._pending[0].done():
            ended = self._pending.popleft().exception()
            self._error = self._error or ended
        if self._error is not None:
            raise AsyncRLHFError(
                f"rollout records could not be written to {self.run_dir}: {failure_sentence(self._error)}"
            ) from self._error

    def sync_metrics(self) -> None:
        """Block until all lines of metrics.jsonl and of the journal are on disk."""
        self.journal.sync()
        os.fsync(self._metrics.fileno())

    def checkpoint(self) -> RecordMarker:
        """Write everything to disk and return the records' position, with seals."""
        marker = self.mark()
        wait(self.unwritten())
        self.raise_if_failed()
        self.sync_metrics()
        return self.sealed(marker)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write everything to disk, then summary.json, which is written even after an error, and then says by
        ``records_whole`` that records are missing. Closes the recorder."""
        whole = False
        try:
            self._end_writing()
            whole = self._error is None
        finally:
            summary = summary if whole else {**summary, "records_whole": False}
            text = json.dumps(plain(summary), indent=2, allow_nan=False)
            try:
                write_atomically(self.run_dir / SUMMARY_FILE, text + "\n")
            finally:
                self._lock.release()

    def close(self) -> None:
        """Write everything to disk and end the writer; a second call does nothing."""
        try:
            self._end_writing()
        finally:
            self._lock.release()

    def _end_writing(self) -> None:
        if self._metrics.closed:
            return
        try:
            self._metrics.close()  # on a full disk only the last line is lost
        finally:
            self._end_parts()

    def _end_parts(self) -> None:
        try:
            self._before_closing()
            self._put(len(self._rows))
            self._pending += self._spans.put()
        finally:
            wait(self._pending)
            self._pool.shutdown(wait=True)
            self.journal.full = lambda: None
            self.journal.mark()
            self.journal.write()
            self.raise_if_failed()

    def _put(self, count: int) -> None:
        """Submit the first ``count`` rows as one part."""
        if not count:
            return
        self.raise_if_failed()
        target = self._folder / part_name(self._parts)
        self._pending.append(self._submit(target, self._rows[:count], self._payloads[:count]))
        self._parts += 1
        self._rows, self._payloads = self._rows[count:], self._payloads[count:]


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The content of summary.json; None without a whole one: the run goes on, or was killed."""
    try:
        found = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without an incomplete last one (the process died while writing).

    Raises ConfigError when an earlier line is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        while block := list(islice(file, LINES)):
            try:
                found = json.loads(f"[{','.join(block)}]")  # at once, so that rows share their keys
            except json.JSONDecodeError:
                found = []
            if len(found) != len(block):
                found = _each(path, [*block, *file], len(rows))
            for number, row in enumerate(found, start=len(rows) + 1):
                if not isinstance(row, dict):
                    raise ConfigError(f"{path} line {number} is not a JSON object; a metrics file has one a line.")
            rows += found
    return rows


def _each(path: Path, lines: Sequence[str], before: int) -> list[Any]:
    """The last lines of a metrics.jsonl one by one, of which one is not JSON."""
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                break
            said = f"{path} line {before + number} is not JSON; a metrics file has one JSON object a line."
            raise ConfigError(said) from None
    return found


def plain(value: Any) -> Any:
    """``value`` in JSON's types only: NumPy becomes Python, tuples lists, paths text, NaN and infinity None."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"cannot record a {type(value).__name__}: {value!r}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
