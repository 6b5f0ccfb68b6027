"""Rivals of the default are judged seed by seed, and the page has the figures of the committed rows."""

from __future__ import annotations

from importlib import import_module

import pandas as pd
import pytest

from asyncrlhf.config.compose import load_config
from experiments.study import Study

rivals = import_module("experiments.48_default.table")


def test_a_lead_is_paired_by_seed() -> None:
    rows = [
        {"method": f"{name}_{rate}", "value": lag, "seed": seed, "reward": 0.1 * seed + 0.02 * (name == "opsm")}
        for name in rivals.NAMES
        for rate in rivals.RATES
        for lag in rivals.LAGS
        for seed in (1, 0, 2)
    ]
    found = rivals.lead(pd.DataFrame(rows), "opsm", "large", 16)
    assert (found.mean, found.error) == (pytest.approx(0.02), pytest.approx(0.0, abs=1e-12))
    assert "| 0.0001 | 16 | 0.100 ± 0.058 | 0.120 ± 0.058 |" in rivals.table(pd.DataFrame(rows))


def test_arms_differ_in_preset_and_rate_alone_and_their_seeds_are_new() -> None:
    study = Study.read(rivals.HERE)
    for method in study.methods:
        name, _, rate = method.partition("_")
        config = load_config(list(study.cell(method, 16, study.rates()[method], 10).overrides))
        assert config.learner.learning_rate == rivals.RATES[rate]
        assert config.algorithm.name == {
            "default": "decoupled_grpo",
            "both": "decoupled_grpo",
            "ewma": "grpo_ewma",
        }.get(name, name)
        assert (config.algorithm.gate == "opsm") == (name in ("opsm", "both"))
        assert config.algorithm.minibatches == 2 and config.async_.fixed_lag == 16
    seen = [Study.read(rivals.HERE.parent / other).seeds for other in ("36_leaderboard", "44_causes")]
    assert not any(set(study.seeds) & set(seeds) for seeds in seen)


def test_the_page_has_the_figures_of_the_committed_rows() -> None:
    study, runs = Study.read(rivals.HERE), pd.read_csv(rivals.HERE / "runs.csv")
    assert (runs.status == "done").all()
    assert (runs.groupby(["method", "value"]).size() == len(study.seeds)).all()
    assert len(runs) == len(study.methods) * len(study.values) * len(study.seeds)
    assert rivals.table(runs) in (rivals.HERE / "README.md").read_text()
