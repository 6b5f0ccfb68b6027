"""The study of curricula: its runs are allowed, a stopped study goes on, and what it counts as samples to a quality."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from asyncrlhf.config.compose import load_config
from experiments.resumable import run_missing

study = import_module("experiments.45_curriculum.prompts")


def test_each_run_is_allowed_and_differs_in_its_prompts_alone() -> None:
    cells = [*study.pilot(), *study.grid()]
    assert len(cells) == len(set(cells)) == 2 * 6 * (3 + 5)
    for cell in cells[:12]:
        config = load_config(study.overrides(cell))
        kinds = [kind for kind in ("difficulty", "regret") if kind in cell.arm]
        assert [config.task.curriculum] == (kinds or ["off"])
        assert config.buffer.filter_zero_spread == ("filter" in cell.arm)


def test_samples_to_a_quality_are_read_off_a_line_between_means_of_two() -> None:
    rows = pd.DataFrame({"step": [0, 4, 8, 12], "sampled": [0, 100, 200, 300], "heldout": [0.1, 0.3, 0.5, 0.5]})
    # the means: 0.2 at 50, 0.4 at 150, 0.5 at 250
    for quality, samples in ((0.3, 100), (0.45, 200), (0.1, 50)):
        assert study.samples_to(rows, quality) == pytest.approx(samples)
    assert pd.isna(study.samples_to(rows, 0.6))


@dataclass(frozen=True)
class Cell:
    name: str
    seed: int


def test_a_stopped_study_goes_on_with_what_is_left(tmp_path: Path) -> None:
    cells, asked = [Cell(name, seed) for name in "ab" for seed in range(3)], []

    def run(cell: Cell) -> list[dict[str, Any]]:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(cell)
        return [{"step": step, "value": step + cell.seed} for step in range(2)]

    path = tmp_path / "runs.csv"
    with pytest.raises(KeyboardInterrupt):
        run_missing(cells, run, path, ["step", "value"])
    asked_before, asked[:] = [*asked], []
    run_missing(cells, run, path, ["step", "value"])
    found = pd.read_csv(path)
    assert asked_before == cells[:4] and asked == cells[4:] and len(found) == 12
    assert (found.value == found.step + found.seed).all()
