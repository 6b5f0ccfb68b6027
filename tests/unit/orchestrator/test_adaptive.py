"""The controller of the staleness bound, look by look."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from asyncrlhf.buffer.async_config import AsyncConfig
from asyncrlhf.orchestrator import adaptive
from asyncrlhf.orchestrator.adaptive import AdaptiveBound


def feed(controller: AdaptiveBound, *values: float) -> list[int]:
    bounds = []
    for value in values:
        controller.observe({"ess_fraction_seq": value})
        bounds.append(controller.bound)
    return bounds


@pytest.fixture(autouse=True)
def every_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, 1, 4)


def look(monkeypatch: pytest.MonkeyPatch, steps: int, good: int) -> None:
    monkeypatch.setattr(adaptive, "STEPS", steps)
    monkeypatch.setattr(adaptive, "GOOD_LOOKS", good)


def make(**settings: object) -> AdaptiveBound:
    return AdaptiveBound(AsyncConfig(**{"max_staleness": 6, "adaptive": True, **settings}))  # type: ignore[arg-type]


def test_halves_down_to_the_least_and_grows_by_one_up_to_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, 1, 2)
    controller = make(min_staleness=1)
    assert feed(controller, 0.1, 0.1, 0.1) == [3, 1, 1]
    assert feed(controller, *[0.6] * 12) == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6]


def test_one_bad_look_starts_patience_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, 1, 3)
    controller = make()
    feed(controller, 0.1)
    assert feed(controller, 0.9, 0.9, 0.4, 0.9, 0.9, 0.9) == [3, 3, 1, 1, 1, 2]


def test_the_mean_of_a_look_decides_and_the_floor_itself_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, 4, 4)
    controller = make()
    assert feed(controller, 0.0, 1.0, 0.5, 0.5) == [6, 6, 6, 6]
    assert feed(controller, 0.0, 1.0, 0.5, 0.49) == [6, 6, 6, 3]


def test_steps_without_an_ess_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, 2, 4)
    controller = make()
    assert controller.observe({}) is None
    assert feed(controller, 0.1, math.nan, math.inf) == [6, 6, 6]
    assert feed(controller, 0.1) == [3]


@pytest.mark.parametrize(
    ("given", "bound"), [({"max_staleness": 6}, 6), ({"mode": "sync"}, 0), ({"mode": "fixed_lag", "lag": 4}, 4)]
)
def test_off_it_is_the_bound_of_the_settings(given: dict[str, Any], bound: int) -> None:
    controller = AdaptiveBound(AsyncConfig(**given))
    assert feed(controller, 0.0, 0.0) == [bound, bound]


def test_its_state_survives_and_keeps_to_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    look(monkeypatch, 2, 2)
    controller, other = make(), make()
    feed(controller, 0.1, 0.1, 0.9, 0.9, 0.9)
    other.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert feed(other, 0.9) == feed(controller, 0.9) == [4]
    narrow = make(max_staleness=2)
    narrow.load_state_dict(controller.state_dict())
    assert narrow.bound == 2
    off = AdaptiveBound(AsyncConfig(max_staleness=5))
    off.load_state_dict(controller.state_dict())
    assert off.bound == 5
