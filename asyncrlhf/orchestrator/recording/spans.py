"""The run's timeline: spans that parts send with their answers, converted to the run's clock, one lane per part."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.records.write.spans import Span, SpanBatch, SpanRow, host

DRIFT = 50e-6  # drift of two machines' clocks, seconds per second


@dataclass
class Clock:
    """The offset of another machine's clock, estimated from the recent message with the shortest round trip.

    ``error`` bounds the error of ``offset`` (this clock less the other), in seconds: half of the round trip's travel
    time.
    """

    offset: float = 0.0
    error: float = float("inf")
    at: float = 0.0

    def hear(self, batch: SpanBatch, sent: float, heard: float) -> None:
        """Update from one answer to a request that left at ``sent`` and was answered at ``heard``, by this clock."""
        error = max(0.0, (heard - sent) - (batch.told - batch.asked)) / 2
        if error <= self.error + DRIFT * (heard - self.at):
            self.offset = ((sent - batch.asked) + (heard - batch.told)) / 2
            self.error, self.at = error, heard


@dataclass
class SpanLog:
    """Joins the spans of one activity to one row per learner step, for each part.

    All times are those of ``wall_time`` in metrics.jsonl, which begins with the first start's learner loop; earlier
    spans are not recorded.
    """

    state: RunState
    recorder: RunRecorder
    _began: float | None = None  # the clock's time at 0 s of the run
    _first: float = 0.0  # where this process's part begins, seconds of the run
    _open: dict[str, SpanRow] = field(default_factory=dict)
    _ended: list[SpanRow] = field(default_factory=list)
    _clocks: dict[str, Clock] = field(default_factory=dict)  # by host
    _lost: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Call it when the learner's loop begins."""
        self._first = self.state.elapsed
        self._began = self.state.now() - self._first

    def hear(self, batch: SpanBatch, sent: float, heard: float) -> None:
        """Take the spans that a part sent with its answer to a request that was sent at ``sent``."""
        if self._began is None:
            return
        clock = Clock(error=0.0)
        if batch.host != host():
            clock = self._clocks.setdefault(batch.host, Clock())
            clock.hear(batch, sent, heard)
        shift = clock.offset - self._began
        for span in batch.spans:
            if (end := span.end + shift) > self._first:
                moved = span._replace(start=min(max(span.start + shift, self._first), end), end=end)
                self._take(SpanRow(batch.part, moved, clock.error))
        if batch.lost:
            self._lost[batch.part] = self._lost.get(batch.part, 0) + batch.lost
            self.state.message(f"{batch.lost} spans of {batch.part} did not fit and are missing from the timeline.")

    def _take(self, row: SpanRow) -> None:
        last = self._open.get(row.part)
        if last is not None:
            one, other, error = last.span, row.span, max(last.clock_error, row.clock_error)
            # Another machine's clock is known better at one time than at the other.
            follows = abs(one.end - other.start) <= 1e-9 + 2 * error and one.end <= other.end
            if follows and (one.kind, one.version) == (other.kind, other.version):
                self._open[row.part] = SpanRow(row.part, one.joined(other), error)
                return
            self._ended.append(last)
            row = row._replace(span=other._replace(start=one.end)) if follows else row
        self._open[row.part] = row

    def step(self) -> None:
        """Record all spans received so far, at the end of a learner step."""
        self._ended += self._open.values()
        self._open.clear()
        ended, self._ended = self._ended, []
        self.recorder.record_spans([_within(row) for row in ended], self.state.elapsed)


def _within(row: SpanRow) -> SpanRow:
    """Limit ``busy_seconds`` to the span's length: a span may have been clipped where this process began."""
    span: Span = row.span
    return row._replace(span=span._replace(busy_seconds=min(span.busy_seconds, span.end - span.start)))
