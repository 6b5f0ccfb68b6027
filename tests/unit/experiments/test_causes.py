"""What a change is worth at a lag: paired by seed, and its page has the figures of the committed rows."""

from __future__ import annotations

from importlib import import_module

import pandas as pd
import pytest

from experiments.study import Study

causes = import_module("experiments.44_causes.table")


def made(rewards: dict[str, dict[int, list[float]]]) -> pd.DataFrame:
    other = {"entropy": 1.0, "ess_fraction": 0.8, "clip_fraction": 0.0, "spikes": 0.0, "status": "done"}
    return pd.DataFrame(
        {"method": method, "value": lag, "seed": seed, "reward": reward} | other
        for method, by_lag in rewards.items()
        for lag, found in by_lag.items()
        for seed, reward in enumerate(found)
    )


def test_a_change_is_judged_by_what_the_lag_costs_with_it_and_without() -> None:
    """Seeds differ by 0.1; the first change halves the cost, the second only raises both."""
    base = [0.4, 0.5, 0.6]
    runs = made(
        {
            "default": {0: base, 16: [r - 0.10 for r in base]},
            "half": {0: base, 16: [r - 0.05 for r in base]},
            "both": {0: [r + 0.02 for r in base], 16: [r - 0.08 for r in base]},
        }
    )
    found = causes.effects(runs).set_index("method")
    assert found.cost_saved.to_dict() == pytest.approx({"default": 0.0, "half": 0.05, "both": 0.0})
    assert found.at_16.to_dict() == pytest.approx({"default": 0.0, "half": 0.05, "both": 0.02})
    assert found.cost_saved_error.max() < 1e-12 < found.lag_0_error.min()


def test_the_page_has_the_figures_of_the_committed_rows() -> None:
    study = Study.read(causes.HERE)
    runs = causes.ordered(pd.read_csv(causes.HERE / "runs.csv"))
    assert list(dict.fromkeys(runs.method)) == list(study.methods)
    assert (runs.groupby(["method", "value"]).size() == len(study.seeds)).all()
    assert causes.table(causes.effects(runs)) in (causes.HERE / "README.md").read_text()
