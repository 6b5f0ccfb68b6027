"""The PNG that an experiment commits: every panel of the report, for one run and for groups of seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.report.load import group_runs, load_runs
from experiments.figures import write_curves
from tests.unit.report.test_report import make_run


@pytest.mark.parametrize("settings", [(1,), (1, 4)])
def test_curves_are_drawn_over_steps(tmp_path: Path, settings: tuple[int, ...]) -> None:
    paths = [make_run(tmp_path / f"e{eta}s{seed}", seed=seed, eta=eta) for eta in settings for seed in (0, 1)]
    write_curves(group_runs(load_runs(paths)), tmp_path / "curves.png")
    drawn = (tmp_path / "curves.png").read_bytes()
    assert drawn[:4] == b"\x89PNG" and len(drawn) > 10_000
