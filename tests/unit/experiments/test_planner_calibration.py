"""The calibration of the call graph: what was planted is found again, and the note's figures are those of its files."""

from __future__ import annotations

import csv
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.planner.shapes import cluster_of

cells = importlib.import_module("experiments.07_planner_calibration.cells")
FOLDER = Path(cells.__file__).parent
NODE = cluster_of("H100", 8)
PLANTED = {"compute": 0.3, "memory": 0.5, "link": 0.4, "layer": 2e-4, "hop": 1e-3}


def test_planted_coefficients_predict_cells_that_were_left_out() -> None:
    given = cells.read_cells(FOLDER / "cells.json")
    made = [replace(cell, seconds=cells.predict(cell, NODE, PLANTED)) for cell in given]
    found = cells.fit_cells(made[::2], NODE)
    for cell in made[1::2]:
        assert cells.predict(cell, NODE, found) == pytest.approx(cell.seconds, rel=0.02)
    assert all(low <= found[name] <= high for name, (low, high, _) in cells.BOUNDS.items())


def test_the_committed_coefficients_give_the_committed_rows() -> None:
    known = json.loads((FOLDER / "coefficients.json").read_text())
    rows = list(csv.DictReader((FOLDER / "cells.csv").open()))
    given = cells.read_cells(FOLDER / "cells.json")
    assert [row["cell"] for row in rows] == [cell.name for cell in given]
    for row, cell in zip(rows, given, strict=True):
        assert cells.predict(cell, NODE, known["coefficients"]) == pytest.approx(float(row["fitted"]), abs=0.06)
        assert cells.predict(cell, NODE, known["of_half"]) == pytest.approx(float(row["half"]), abs=0.06)
    alone = [abs(float(row["left_out"]) / float(row["published"]) - 1) for row in rows]
    said = re.search(r"leave one out \| 12 \| ([\d.]+)% \| ([\d.]+)%", (FOLDER / "README.md").read_text())
    assert said is not None
    assert [float(words) for words in said.groups()] == pytest.approx(
        [100 * np.median(alone), 100 * max(alone)], abs=0.15
    )


def test_each_cell_counts_once(tmp_path: Path) -> None:
    row = {"setting": "actor", "size": "7B", "response": 128, "batch": 512, "gpus": 8, "seconds": 31.2}
    for rows, said in (([row, row], "twice"), ([{**row, "size": "8B"}], "actor 8B g128 is not a cell")):
        (tmp_path / "cells.json").write_text(json.dumps({"cells": rows}))
        with pytest.raises(ValueError, match=said):
            cells.read_cells(tmp_path / "cells.json")
