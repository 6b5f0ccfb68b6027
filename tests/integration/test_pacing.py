"""``async.pacing=just_in_time`` on the virtual clock: fresher, not slower, never over the bound, never stuck."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from asyncrlhf.orchestrator import lead

worlds = importlib.import_module("experiments.23_pacing.worlds")
SMALL = ("num_generations=4", "batch_size=16", "generator.slots=16", "generator.replicas=2")
WARM_UP = 20


def world(**changes: Any) -> Any:
    return worlds.World(SMALL, **{"tail": 0.03, "median": 0.08, **changes})


def paced(pacing: str, made: Any, *overrides: str, **more: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    metrics, rows = worlds.imitate(made, f"async.pacing={pacing}", *overrides, **more)
    return worlds.figures(metrics, rows, WARM_UP), metrics


def compared(made: Any, *overrides: str) -> tuple[float, float, dict[str, float]]:
    """Staleness over 1 and speed of ``just_in_time``, both as shares of ``fill``'s; its figures."""
    fill, _ = paced("fill", made, "steps=100", *overrides)
    own, _ = paced("just_in_time", made, "steps=100", *overrides)
    over = (own["staleness"] - 1) / (fill["staleness"] - 1)
    return over, own["steps_per_second"] / fill["steps_per_second"], own


def test_batches_are_fresher_and_the_learner_waits_no_more() -> None:
    over, speed, own = compared(world(), "async.max_staleness=4")
    assert over <= 0.4 and speed >= 0.97
    assert own["staleness"] == pytest.approx(own["pacing_lead"], abs=0.3), "the lead is what it costs"
    assert own["pacing_margin"] == pytest.approx(own["pacing_margin_predicted"], abs=0.4)


def test_without_the_tail_of_the_needs_the_learner_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something: with the median in the place of the quantile it fails."""
    monkeypatch.setattr(lead, "QUANTILE", 0.1)
    _, speed, _ = compared(world(), "async.max_staleness=4")
    assert speed < 0.97
