"""``async.pacing=just_in_time`` on the virtual clock: fresher, not slower, never over the bound, never stuck."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from asyncrlhf.cluster.local_runtime import LocalGenerator, LocalRuntime
from asyncrlhf.orchestrator.learning import lead
from asyncrlhf.orchestrator.learning.lead import Lead

worlds = importlib.import_module("experiments.23_pacing.worlds")
SMALL = ("num_generations=4", "batch_size=16", "generator.slots=16", "generator.replicas=2")
WARM_UP = 20


def world(**changes: Any) -> Any:
    return worlds.World(SMALL, **{"tail": 0.02, "median": 0.08, "train": lambda version: 0.25, **changes})


def paced(pacing: str, made: Any, *overrides: str, **more: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    metrics, rows = worlds.imitate(made, f"async.pacing={pacing}", *overrides, **more)
    return worlds.figures(metrics, rows, WARM_UP), metrics


def compared(made: Any, bound: int, steps: int = 70) -> tuple[float, float, dict[str, float]]:
    """Staleness over 1 and speed of ``just_in_time``, both as shares of ``fill``'s; its figures."""
    given = (f"async.max_staleness={bound}", f"steps={steps}")
    (fill, _), (own, _) = (paced(pacing, made, *given) for pacing in ("fill", "just_in_time"))
    over = (own["staleness"] - 1) / (fill["staleness"] - 1)
    return over, own["steps_per_second"] / fill["steps_per_second"], own


def test_batches_are_fresher_and_the_learner_waits_no_more() -> None:
    over, speed, own = compared(world(), bound=4)
    assert over <= 0.4 and speed >= 0.97
    assert own["staleness"] == pytest.approx(own["pacing_lead"], abs=0.3), "the lead is what it costs"
    assert own["pacing_margin"] == pytest.approx(own["pacing_margin_predicted"], abs=0.3)


def test_without_the_tail_the_learner_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: with what is needed at best in the place of the quantile it fails."""
    monkeypatch.setattr(lead, "QUANTILE", 0.0)
    assert compared(world(), bound=4)[1] < 0.97


def sudden(version: int) -> float:
    """Seconds of a step: from version 30 on the learner is 2.5 times faster."""
    return 0.25 if version < 30 else 0.1


def late_speed(metrics: list[dict[str, Any]]) -> float:
    return 25 / float(metrics[75]["wall_time"] - metrics[50]["wall_time"])


@pytest.mark.in_turn
@pytest.mark.more
def test_a_learner_that_gets_faster_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("async.max_staleness=4", "steps=82")
    fill, own = (late_speed(paced(p, world(train=sudden), *given)[1]) for p in ("fill", "just_in_time"))
    # Not the 0.97 of experiments/23_pacing, for a straggler is a quarter of these small batches; what does not follow
    # stays below this, as the last line shows.
    assert own >= 0.92 * fill
    read = Lead.asked
    monkeypatch.setattr(Lead, "asked", lambda self: read(self) if self._state.version < 30 else None)
    assert late_speed(paced("just_in_time", world(train=sudden), *given)[1]) < 0.9 * fill, "the rhythm is ignored"


def freeze(runtime: LocalRuntime) -> None:
    runtime.generators[1].worker.frozen = True  # type: ignore[attr-defined]


def kill(runtime: LocalRuntime) -> None:
    victim = runtime.generators[1]
    assert isinstance(victim, LocalGenerator)
    victim.kill()


@pytest.mark.parametrize("strike", [freeze, kill])
def test_a_frozen_or_dead_replica_stops_nothing(strike: Callable[[LocalRuntime], None]) -> None:
    def later(runtime: LocalRuntime) -> None:
        asyncio.get_running_loop().call_later(5.0, strike, runtime)

    metrics = paced("just_in_time", world(), "steps=60", "async.max_staleness=3", meddle=later)[1]
    assert len(metrics) == 60 and max(row["staleness_max"] for row in metrics) <= 3
    assert metrics[54]["wall_time"] - metrics[34]["wall_time"] < 1.2 * 20 * 0.25


def test_a_learner_that_slows_down_gets_fresh_batches() -> None:
    slowing = world(train=lambda version: 0.1 if version < 30 else 2.0)
    metrics = paced("just_in_time", slowing, "steps=70", "async.max_staleness=8")[1]
    late = [row["staleness_mean"] for row in metrics[52:60]]
    assert len(metrics) == 70 and max(late) <= 1.3


@given(
    bound=st.integers(0, 4),
    every=st.integers(1, 3),
    made=st.builds(
        world,
        median=st.floats(0.01, 0.5),
        sigma=st.floats(0.0, 1.5),
        tail=st.floats(0.0, 0.1),
        transfer=st.floats(0.0, 0.5),
        jitter=st.floats(0.0, 1.0),
    ),
    late=st.sampled_from(["drop", "mask", "wait", "downweight"]),
)
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])  # to shrink takes minutes
def test_the_bound_holds_and_every_step_is_made(bound: int, every: int, made: Any, late: str) -> None:
    given = (f"async.max_staleness={bound}", f"weights.publish_every={min(every, bound + 1)}", "steps=18")
    metrics, rows = worlds.imitate(made, "async.pacing=just_in_time", f"async.over_stale={late}", *given)
    assert len(metrics) == 18 and len({row.rollout_id for row in rows}) == len(rows)
    if late in ("drop", "wait"):
        assert max(row["staleness_max"] for row in metrics) <= bound
