"""Figures of single replicas: rates from totals, many of them put together, none for a replica that is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrlhf.orchestrator.learning.meters import ReplicaMeters
from asyncrlhf.orchestrator.pace import Pace
from asyncrlhf.orchestrator.state import Replica
from asyncrlhf.records.show.progress import Progress
from asyncrlhf.records.show.summary import replica_means


def replica(name: str, **facts: Any) -> Replica:
    return Replica(SimpleNamespace(name=name, slots=4), version=facts.pop("version", 5), **facts)  # type: ignore[arg-type]


def world(replicas: list[Replica]) -> Any:
    return SimpleNamespace(replicas=replicas, version=7)


def test_figures_are_of_the_step_and_a_lost_replica_takes_none_along() -> None:
    fast, slow = replica("generator-0"), replica("generator-1", version=6)
    meters = ReplicaMeters(world([fast, slow]))
    fast.busy_seconds, fast.tokens, fast.pace.finished = 2.0, 100, 10
    slow.busy_seconds, slow.tokens = 4.0, 8
    meters.step(4.0)
    fast.busy_seconds, fast.tokens, fast.pace.finished = 3.0, 160, 16
    slow.pace = Pace(latency=1.5, window=0.0)
    row = meters.step(2.0)
    assert row["generator/generator-0/tokens_per_second"] == 30
    assert row["generator/generator-0/rollouts"] == 6
    assert row["generator/generator-0/idle_fraction"] == 0.5
    assert (row["generator/generator-0/lag"], row["generator/generator-1/lag"]) == (2, 1)
    assert (row["generator/generator-1/held_back"], row["generator/generator-1/latency"]) == (1, 1.5)
    assert (row["generators_alive"], row["generators_held_back"]) == (2, 1)
    assert row["generator_idle_fraction"] == pytest.approx(0.75) and row["generated_tokens_per_second"] == 30
    meters._state.replicas.remove(fast)
    alone = meters.step(1.0)
    assert alone == {"generator_idle_fraction": 1.0, "generated_tokens_per_second": 0.0}


def test_no_second_of_work_is_lost_when_several_steps_end_between_two_reports() -> None:
    """A replica at work for 3 of 4 seconds, which it tells every second step: a share cut off at 1 was never given
    back, and the mean showed it idle for half of the time and more."""
    one = replica("generator-0")
    meters = ReplicaMeters(world([one]))
    meters.step(1.0)
    shares = []
    for busy in (0.0, 3.0, 3.0, 6.0, 6.0, 9.0):
        one.busy_seconds = busy
        shares.append(meters.step(2.0)["generator_idle_fraction"])
    assert shares == [1.0, 0.0, 0.5, 0.0, 0.5, 0.0]
    one.busy_seconds = 10.0
    assert meters.step(2.0)["generator_idle_fraction"] == 0.0, "the second told, and one of before"


def test_beyond_sixteen_the_rest_is_put_together() -> None:
    replicas = [replica(f"generator-{i}", tokens=i) for i in range(20)]
    row = ReplicaMeters(world(replicas)).step(1.0)
    names = {key.split("/")[1] for key in row if "/" in key}
    assert names == {*(f"generator-{i}" for i in range(15)), "others"}
    assert row["generator/others/tokens_per_second"] == 15 + 16 + 17 + 18 + 19
    assert row["generated_tokens_per_second"] == sum(range(20))


def test_the_summary_weighs_by_time() -> None:
    rows = [
        {"wall_time": 1.0, "generator/a/rollouts": 3, "generator/a/idle_fraction": 0.0, "generator/a/restarts": 0},
        {"wall_time": 4.0, "generator/a/rollouts": 1, "generator/a/idle_fraction": 0.4, "generator/a/restarts": 1},
    ]
    (figures,) = replica_means(rows).values()
    assert (figures["rollouts"], figures["restarts"]) == (4, 1)
    assert figures["idle_fraction"] == pytest.approx(0.3)


def test_progress_tells_how_many_are_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(10, "plain")
    progress.update({"step": 1, "generators_alive": 3, "generators_held_back": 1.0})
    assert "generators 3 (1 held back)" in capsys.readouterr().out
