"""Seconds to a quality: when a curve reaches it, and that the page has the figures of the committed rows."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.config.compose import load_config

table = import_module("experiments.43_time_to_quality.table")


def curve(*accuracy: float) -> pd.DataFrame:
    steps = 5 * np.arange(1, len(accuracy) + 1)
    return pd.DataFrame({"step": steps, "wall_time": 2.0 * steps, "heldout_accuracy": accuracy})


def test_a_quality_is_reached_when_the_mean_of_three_evaluations_is_there() -> None:
    assert table.reached(curve(0.3, 0.9, 0.3, 0.3, 0.5, 0.6, 0.7, 0.7), 0.6) == (70.0, 35.0)
    assert table.reached(curve(0.3, 0.4, 0.5, 0.5), 0.6) == (np.inf, np.inf)
    assert table.reached(curve(0.6, 0.6, 0.6), 0.6) == (30.0, 15.0)


def test_arms_are_compared_seed_by_seed() -> None:
    """Seeds differ much more than the arms do."""
    seeds, slow = range(5), np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    rows = [{"arm": arm, "seed": s, "seconds": f * slow[s]} for s in seeds for arm, f in (("a", 1.0), ("b", 0.5))]
    found = table.ratio(pd.DataFrame(rows), "b", "seconds", "a")
    assert found.mean == pytest.approx(0.5) and found.error == pytest.approx(0, abs=1e-12)


def test_the_page_has_the_figures_of_the_committed_rows() -> None:
    jobs, curves = pd.read_csv(table.JOBS), pd.read_csv(table.CURVES)
    assert set(zip(jobs.arm, jobs.seed, strict=True)) == {(arm, seed) for arm in table.ARMS for seed in range(5)}
    page = (table.HERE / "README.md").read_text()
    assert table.table(table.with_goals(jobs, curves)) in page


def test_the_arms_are_those_of_the_experiment() -> None:
    parts = load_config(["experiment=time_to_quality"]).sweep.parts
    assert set(parts) == {arm.partition(",")[0] for arm in table.ARMS}
    assert "async.max_staleness=1,2,3,4" in parts["bounds"]["overrides"]
