"""Spans: which part did what, from when to when. A :class:`Lane` measures a part; :class:`SpanParts` writes the
files."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pyarrow as pa

from asyncrlhf.records.write.whole_files import write_table

SPANS_FOLDER = "spans"
LANE_LIMIT = 2048  # spans that wait for a message; further ones are counted as lost
SHORT_WAIT = 0.001  # seconds: a shorter pause within one activity is not a span of its own


class Span(NamedTuple):
    """One row of ``spans/*.parquet``, without its part; times are seconds of the clock that measured it.

    ``kind``: ``decode``, ``load``, ``score``, ``train``, ``snapshot``, ``transfer``, ``save`` or ``wait``.
    """

    kind: str
    start: float
    end: float
    version: int = -1  # of the weights in use, loaded or sent; of the policy that a step trains; -1: of none
    rollouts: int = 0
    tokens: int = 0
    iterations: int = 0
    sequence_iterations: int = 0  # the sequences of each iteration, added up
    busy_seconds: float = 0.0  # at most end - start
    cpu_seconds: float = 0.0  # of all threads of the part's process; 0 where parts share a process

    def joined(self, later: Span) -> Span:
        """This span and the one that follows it, as one."""
        sums = (a + b for a, b in zip(self[4:], later[4:], strict=True))
        return Span(self.kind, self.start, later.end, self.version, *sums)  # type: ignore[arg-type]


_TYPES = {str: pa.string(), float: pa.float64(), int: pa.int64()}
SPAN_SCHEMA = pa.schema(
    [
        ("part", pa.string()),
        *((name, _TYPES[kind]) for name, kind in get_type_hints(Span).items()),
        ("clock_error", pa.float64()),
    ]
)


class SpanBatch(NamedTuple):
    """The spans that one part sends with an answer; ``asked`` and ``told``: when the request arrived and when the
    answer left, by the clock of ``host``."""

    part: str
    spans: Sequence[Span]
    asked: float
    told: float
    host: str
    lost: int = 0  # spans that did not fit


@cache
def host() -> str:
    """An id of this machine since its last start: all its processes share one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class Lane:
    """The activities of one part, measured in the part: exactly one kind at any time, so that its spans follow each
    other without gaps or overlaps. Thread-safe."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic, short_wait: float = SHORT_WAIT) -> None:
        """``short_wait``: seconds; a shorter wait between two spans of the same kind and version joins them. CPU time
        is measured with the real clock only: parts on another clock share one process."""
        self.part = part
        self.version = -1
        self._clock, self._short_wait = clock, short_wait
        self._cpu = time.process_time if clock is time.monotonic else float
        self._lock = threading.RLock()
        self._done: list[Span] = []
        self._lost = 0
        self._open("wait", clock(), self._cpu())
        # Within a ``during``: the activity to enter afterwards, and its counts.
        self._covered, self._after, self._later = False, "wait", [0, 0, 0, 0]

    def _open(self, kind: str, since: float, cpu: float) -> None:
        self._kind, self._since = kind, since
        self._counts = [0, 0, 0, 0]
        self._busy, self._paused = 0.0, 0.0
        self._cpu_since = cpu

    def enter(self, kind: str, version: int | None = None) -> None:
        """From now on the part's activity is ``kind``, with the weights of ``version`` (None: unchanged)."""
        with self._lock:
            if self._covered:
                self._after = kind
                return
            if kind == self._kind and version in (None, self.version):
                return
            now = self._clock()
            last, pause = self._done[-1] if self._done else None, now - self._since
            short = self._kind == "wait" and pause < self._short_wait
            if short and last and last.kind == kind and last.version == (self.version if version is None else version):
                self._open(kind, last.start, self._cpu_since - last.cpu_seconds)
                self._counts = list(last[4:8])
                self._done.pop()
                self._paused = last.end - last.start - last.busy_seconds + pause
                self._busy = last.busy_seconds if kind == "decode" else 0.0
                return
            self._cut(now, over=True)
            self._open(kind, now, self._cpu_since)
            if kind != "wait":
                self._counts, self._later = self._later, [0, 0, 0, 0]
            self.version = self.version if version is None else version

    @contextmanager
    def during(self, kind: str, version: int | None = None, rollouts: int = 0, tokens: int = 0) -> Iterator[None]:
        """Within this context the activity is ``kind`` with these counts, even if :meth:`enter` is called; afterwards
        it is the last one entered, or the one before."""
        if self._covered:
            yield
            return
        with self._lock:
            before = self._kind
            self.enter(kind, version)
            self.count(rollouts, tokens)
            self._covered, self._after = True, before
        try:
            yield
        finally:
            with self._lock:
                self._covered = False
                self.enter(self._after)

    def count(self, rollouts: int, tokens: int, iterations: int = 0, sequences: int = 0, busy: float = 0.0) -> None:
        """Add to the present span, or to the next one if a ``during`` covers it; ``sequences``: summed over these
        iterations; ``busy``: seconds (0: the whole span)."""
        with self._lock:
            added = (rollouts, tokens, iterations, sequences)
            counts = self._later if self._covered else self._counts
            counts[:] = [a + b for a, b in zip(counts, added, strict=True)]
            self._busy += 0.0 if self._covered else busy

    def take(self, asked: float | None = None) -> SpanBatch:
        """All spans up to now; the present span continues in the next batch. ``asked``: when the request arrived."""
        with self._lock:
            now = self._clock()
            self._cut(now, over=False)
            taken, self._done = self._done, []
            lost, self._lost = self._lost, 0
        return SpanBatch(self.part, taken, now if asked is None else asked, now, host(), lost)

    def _cut(self, now: float, over: bool) -> None:
        """End the present span and begin another of its kind. Drop a span without duration unless it counted
        something."""
        cpu = self._cpu()  # read once: the system adds up the times of all threads
        if now > self._since or (over and self._kind not in ("wait", "decode")) or any(self._counts):
            if len(self._done) < LANE_LIMIT:
                self._done.append(self._span(now, cpu))
            else:
                self._lost += 1
        self._open(self._kind, now, cpu)

    def _span(self, now: float, cpu: float) -> Span:
        seconds = now - self._since
        busy = 0.0 if self._kind == "wait" else min(self._busy or seconds - self._paused, seconds)
        counts, used = self._counts, cpu - self._cpu_since
        return Span(self._kind, self._since, now, self.version, *counts, max(0.0, busy), used)  # type: ignore[call-arg]


class SpanRow(NamedTuple):
    """A span on the run's clock. ``clock_error``: seconds by which its times may differ from other parts' clocks."""

    part: str
    span: Span
    clock_error: float = 0.0


class SpanParts:
    """Numbered Parquet files of spans, which ``submit`` writes in another thread."""

    def __init__(
        self, folder: Path, rows_of_a_part: int, parts: int, submit: Callable[[Callable[[], None]], Future[None]]
    ) -> None:
        self._folder, self._rows_of_a_part, self._submit = folder, rows_of_a_part, submit
        self.parts = parts  # numbers given out
        self._rows: list[SpanRow] = []

    def add(self, rows: Sequence[SpanRow], until: float) -> list[Future[None]]:
        """Keep rows; if enough have ended by ``until``, submit them as a part. Returns the writes that this started."""
        self._rows += rows
        return self.put(until) if len(self._rows) >= self._rows_of_a_part else []

    def put(self, until: float = float("inf")) -> list[Future[None]]:
        """Submit one part of all rows that ended by ``until``, in seconds of the run: a part that a checkpoint counts
        contains nothing that a resumed run repeats."""
        ended = [row for row in self._rows if row.span.end <= until]
        if not ended:
            return []
        self._rows = [row for row in self._rows if row.span.end > until]
        target = self._folder / f"part-{self.parts:05d}.parquet"
        self.parts += 1
        return [self._submit(lambda: write_spans(target, ended))]


def write_spans(target: Path, rows: Sequence[SpanRow]) -> None:
    """Write one Parquet file, which appears complete."""
    columns: dict[str, list[Any]] = {"part": [row.part for row in rows]}
    columns |= {name: [getattr(row.span, name) for row in rows] for name in Span._fields}
    columns["clock_error"] = [row.clock_error for row in rows]
    target.parent.mkdir(exist_ok=True)
    write_table(target, columns, SPAN_SCHEMA)
