"""The control plane's benchmark still has all that the controller asks of its parts."""

from __future__ import annotations

import importlib

control_plane = importlib.import_module("experiments.22_control_plane.bench")


def test_the_benchmark_trains_a_step_and_measures_its_rollouts() -> None:
    found = control_plane.run(["--rounds", "1", "--replicas", "2", "--batches", "2.2", "--seconds", "20"])
    (row,) = found["runs"]["2 replicas"]
    assert row["steps"] >= 1 and row["rollouts"] >= control_plane.SLOTS and row["process_ms"] > 0
