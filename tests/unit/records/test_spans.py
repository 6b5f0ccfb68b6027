"""Lanes of one part's spans, and how another machine's clock is put on this one's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrlhf.cluster import ray_runtime
from asyncrlhf.cluster.ray_handles import RayPart
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.orchestrator.recording.spans import Clock, SpanLog
from asyncrlhf.records.write import spans
from asyncrlhf.records.write.spans import Lane, Span, SpanBatch


class Now:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def kinds(batch: SpanBatch) -> list[tuple[str, float, float]]:
    return [(span.kind, span.start, span.end) for span in batch.spans]


def test_a_lane_is_always_in_one_span_and_a_message_takes_what_is_over() -> None:
    now = Now()
    lane = Lane("generator-0", now)
    now.time = 1.0
    lane.enter("decode", 3)
    now.time = 3.0
    lane.count(1, 20, 4, 8, busy=1.5)
    with lane.during("load", 4):
        now.time = 3.5
        lane.enter("decode")  # what it does afterwards
        lane.count(1, 7)
    now.time = 4.0
    first = lane.take()
    assert kinds(first) == [("wait", 0, 1), ("decode", 1, 3), ("load", 3, 3.5), ("decode", 3.5, 4)]
    assert [span.version for span in first.spans] == [-1, 3, 4, 4]
    assert first.spans[1] == Span("decode", 1.0, 3.0, 3, 1, 20, 4, 8, 1.5)
    assert (first.spans[3].rollouts, first.spans[3].tokens) == (1, 7)
    now.time = 5.0
    lane.enter("wait")
    now.time = 6.0
    assert kinds(lane.take()) == [("decode", 4, 5), ("wait", 5, 6)]


def test_a_pause_of_less_than_a_millisecond_is_no_span_and_is_not_busy() -> None:
    now = Now()
    lane = Lane("reward-0", now)
    for start in (1.0, 2.0, 3.0):
        now.time = start
        with lane.during("score", None, 2, 10):
            now.time = start + 0.9995
    now.time = 9.0
    wait, score, after = lane.take().spans
    assert (wait.kind, after.kind) == ("wait", "wait")
    assert (score.start, score.rollouts, score.tokens) == (1.0, 6, 30) and score.end == pytest.approx(3.9995)
    assert score.busy_seconds == pytest.approx(3 * 0.9995)


def test_the_cpu_time_of_a_process_is_told_by_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real clock alone: parts on another one share a process. A joined span keeps the seconds of both."""
    used = Now()
    monkeypatch.setattr(spans.time, "process_time", used)
    lane, shared = Lane("reward-0", short_wait=60.0), Lane("reward-0", Now())
    used.time = 1.0  # while it waits for work
    for seconds in (2.0, 4.0):
        with lane.during("score"), shared.during("score"):
            used.time += seconds
        used.time += 0.25
    told = {span.kind: span.cpu_seconds for span in lane.take().spans}
    assert told == {"wait": 0.25, "score": 6.25}
    assert {span.cpu_seconds for span in shared.take().spans} <= {0.0}


def test_a_lane_that_nobody_empties_does_not_grow() -> None:
    now = Now()
    lane = Lane("generator-0", now, short_wait=0.0)
    for i in range(3 * spans.LANE_LIMIT):
        now.time = float(i)
        lane.enter("decode" if i % 2 else "wait", i)
    batch = lane.take()
    assert len(batch.spans) == spans.LANE_LIMIT and batch.lost > spans.LANE_LIMIT
    assert lane.take().lost == 0


def test_another_machines_clock_is_known_to_the_error_that_is_stated() -> None:
    rng = np.random.default_rng(0)
    clock, true_offset, errors = Clock(), 1234.5, []
    for sent in np.arange(0.0, 60.0, 0.5):
        there, work, back = rng.exponential(0.003) + 1e-4, rng.uniform(0, 0.4), rng.exponential(0.02) + 1e-4
        asked = sent + there - true_offset
        clock.hear(SpanBatch("p", (), asked, asked + work, "other"), sent, sent + there + work + back)
        assert abs(clock.offset - true_offset) <= clock.error + 1e-9
        errors.append(clock.error)
    assert errors[-1] < 0.005


def test_spans_of_another_machine_stand_where_they_were_and_say_their_error(tmp_path: Path) -> None:
    rows: list[Any] = []
    recorder: Any = SimpleNamespace(record_spans=lambda given, elapsed: rows.extend(given))
    state: Any = SimpleNamespace(elapsed=20.0, now=lambda: 100.0, message=lambda text: None)
    log = SpanLog(state, recorder)
    early = SpanBatch("reward-0", [Span("score", 0.0, 1.0)], 0.0, 1.0, spans.host())
    log.hear(early, 0.0, 1.0)  # before the learner's loop
    log.begin()  # 100 s of the clock are 20 s of the run
    # The other clock is 50 s behind; 0.2 s on the way, there and back alike.
    log.hear(SpanBatch("generator-0", [Span("decode", 45.0, 52.0, 1)], 45.0, 52.0, "other"), 94.8, 102.2)
    log.hear(SpanBatch("generator-0", [Span("decode", 52.0, 53.0, 1, 3)], 52.0, 53.0, "other"), 101.8, 103.2)
    log.step()
    (row,) = rows
    assert (row.part, row.span.kind, row.span.rollouts) == ("generator-0", "decode", 3)
    assert row.span.start == 20.0, "clipped where this process begins"
    assert row.span.end == pytest.approx(23.0) and row.clock_error == pytest.approx(0.2)


def test_spans_follow_each_other_though_the_other_clock_becomes_better_known(tmp_path: Path) -> None:
    rows: list[Any] = []
    recorder: Any = SimpleNamespace(record_spans=lambda given, elapsed: rows.extend(given))
    log = SpanLog(SimpleNamespace(elapsed=20.0, now=lambda: 100.0, message=lambda text: None), recorder)  # type: ignore[arg-type]
    log.begin()
    # By the first message the other clock is 50 s behind, give or take 0.2; by the second 49.8, give or take 0.1.
    log.hear(SpanBatch("generator-0", [Span("decode", 45.0, 52.0, 1)], 45.0, 52.0, "other"), 94.8, 102.2)
    told = [Span("load", 52.0, 53.0, 2), Span("decode", 53.0, 54.0, 2)]
    log.hear(SpanBatch("generator-0", told, 52.0, 54.0, "other"), 101.7, 103.9)
    log.step()
    times = [(row.span.kind, pytest.approx(row.span.start), pytest.approx(row.span.end)) for row in rows]
    assert times == [("decode", 20.0, 22.0), ("load", 22.0, 22.8), ("decode", 22.8, 23.8)]


async def test_a_replica_that_ray_starts_again_tells_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[SpanBatch] = []
    made = RayRuntime.__new__(RayRuntime)  # without a Ray
    made.told = lambda batch, sent, now: heard.append(batch)
    facts = {
        "_placer": SimpleNamespace(options=lambda name: None),
        "_cluster": SimpleNamespace(start_timeout_seconds=1),
    }
    vars(made).update(facts)
    monkeypatch.setattr(ray_runtime, "RayGenerator", lambda spec, *rest: RayPart(spec.name, None))
    again: Any = made._generator(SimpleNamespace(name="generator-0"))  # type: ignore[arg-type]
    batch = SpanBatch("generator-0", [Span("decode", 0.0, 1.0)], 0.0, 1.0, "other")
    again.hear([batch], 0.0)
    assert heard == [batch]
