"""A Ray cluster that gains, drains and loses nodes in the middle of a run: what sits there moves, and the run goes on.

Runs of :mod:`tests.integration.nodes_process`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import reports_of

PROCESS = "tests.integration.nodes_process"


@pytest.mark.thorough
def test_what_sits_on_a_drained_node_leaves_in_order(tmp_path: Path) -> None:
    """A replica without a death on its account; a learner with a checkpoint out of turn; the driver ends the run."""
    reports, _ = reports_of(PROCESS, tmp_path, "drains", seconds=280)
    replica, learner, driver = (reports[part] for part in ("generator", "learner", "driver"))
    assert replica["reason"] == "done" and replica["steps"] == 8
    assert replica["to"] != replica["from"] and replica["restarts"] == 0
    assert learner["reason"] == "done" and learner["steps"] == 8 and learner["checkpoints"] == [5], learner
    assert driver["reason"] == "interrupted" and driver["checkpoints"] == [driver["steps"]], driver


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["learner", "reward"])
def test_what_sat_on_a_lost_node_starts_on_another_and_the_run_ends_whole(tmp_path: Path, part: str) -> None:
    """Ray takes half a minute to notice."""
    reports, _ = reports_of(PROCESS, tmp_path, f"lost {part}", seconds=280)
    report = reports[part]
    assert report["reason"] == "done" and report["steps"] == 14
    assert report["ledger"]["adds_up"] and report["ledger"]["trained"] == 14 * 16
    assert (report["ledger"]["dropped"].get("rolled_back", 0) > 0) == (part == "learner")


@pytest.mark.thorough
def test_a_replica_joins_with_a_node_and_is_lost_with_it(tmp_path: Path) -> None:
    reports, out = reports_of(PROCESS, tmp_path, "growth", seconds=180)
    report, said = reports["growth"], " ".join(out.split())
    assert "generator-1 joined at version" in said and "generator-1 is not started again" in said
    assert report["steps"] == 24 and report["staleness"] <= 2
    consumed = report["versions"]["generator-1"]
    assert len(consumed) >= 16 and min(consumed) >= 4, "the new replica took part, and not before it came"
    assert max(consumed) <= 12 + 3, "what it finished before its node died was trained within the bound"
    assert max(report["versions"]["generator-0"]) == 23
