"""What other systems would do, on the command line: sentences for nonsense, and a comparison on the real controller."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from asyncrlhf.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--what-if", "--device", "H1000"], "H1000 is not a device of devices.json; allowed: A10"),
        (["plan", "--what-if", "--model", "nowhere"], "--model nowhere is neither one of"),
        (["plan", "--what-if", "--batch", "0"], "--batch 0 is too small"),
        (["plan", "--compare-templates", "--devices", "8,nine"], "--devices 8,nine: invalid literal"),
        (["plan", "--compare-templates", "--devices", "12"], "12 devices do not fill nodes of 8"),
        (["plan", "--compare-templates", "--batch", "100"], "--batch 100 are no whole groups of 8"),
        (["plan", "--compare-templates", "--cv", "nan"], "--cv nan is too small"),
        (["plan", "--compare-templates", "--staleness"], "unrecognized arguments"),
    ],
)
def test_nonsense_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_plans_of_other_systems_are_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--what-if", "--model", "llama-2-7b", "--devices", "8", "--batch", "64", "--steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "cannot run it" in out and "separate, delayed" in out and "expect errors of 30%" in out
    # Of 13.48 GB: 7/8, 7/8 and 1/4 - 1/8 (p=1, t=8, d=1 to t_g=4).
    assert "11.79 GB (ds-chat), 11.79 GB (ungrouped), 1.68 GB (hybridflow)" in out


@pytest.mark.thorough
def test_templates_keep_their_lag_and_those_that_overlap_are_quicker(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert main(["plan", "--compare-templates", "--devices", "8", "--batch", "64", "--out", str(out)]) == 0
    rows = {row["template"]: row for row in csv.DictReader(out.open())}
    step, staleness = ({name: float(row[key]) for name, row in rows.items()} for key in ("step_seconds", "staleness"))
    assert all(staleness[name] == 0 for name in rows if name.startswith("sync"))
    assert staleness["one-step"] == 1
    assert all(staleness[f"async, lag {lag}"] <= lag for lag in (1, 2, 4, 8))
    assert step["sync, fused chunks"] < step["sync, disaggregated"]
    assert step["async, lag 4"] < step["one-step"] < step["sync, disaggregated"]
