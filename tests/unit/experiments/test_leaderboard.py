"""The leaderboard: its figures from made-up runs, and that docs and sweep are those of the committed CSV files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import conf_folder
from experiments.study import Study
from tests.numeric import assert_close

board = import_module("experiments.36_leaderboard.table")
LAGS = (0, 1, 4, 16)


def made(rewards: dict[str, dict[int, list[float]]]) -> pd.DataFrame:
    """``runs.csv`` of rewards by method, lag and seed."""
    rows = [
        {"method": method, "value": lag, "seed": seed, "reward": reward, "learning_rate": 1e-4, "spikes": 0.0}
        | {"ess_fraction_seq": 0.5}
        for method, by_lag in rewards.items()
        for lag, found in by_lag.items()
        for seed, reward in enumerate(found)
    ]
    return pd.DataFrame(rows)


def curves(runs: pd.DataFrame, step: int) -> pd.DataFrame:
    """Curves that reach the goal with the batch of a step."""
    rows = [
        {"method": run.method, "value": run.value, "seed": run.seed, "update": 2 * at, "reward_mean": float(at >= step)}
        for run in runs.itertuples()
        for at in (10, 20, 30)
    ]
    return pd.DataFrame(rows)


def by_lag(*base: float, lost: float = 0.1) -> dict[int, list[float]]:
    return {lag: [value - lost * np.log2(1 + lag) / 4 for value in base] for lag in LAGS}


def test_methods_are_compared_seed_by_seed() -> None:
    """Seeds differ much more than methods do; one method leads by 0.02 with every one of them."""
    seeds = (0.3, 0.4, 0.5)
    runs = made(
        {
            board.DEFAULT: by_lag(*seeds),
            "first": by_lag(*(s + 0.02 + 1e-3 * i for i, s in enumerate(seeds))),
            "tied": by_lag(0.52, 0.42, 0.32),
            "broken": {**by_lag(*seeds), 16: [0.1, float("nan"), 0.1]},
        }
    )
    ranked = board.ranking(runs, curves(runs, 20), list(runs.method.unique()))
    assert list(ranked.method[:1]) == ["first"] and ranked.method.iloc[-1] == "broken"
    first = ranked[ranked.method == "first"].iloc[0]
    assert_close([first.lead, first.lead_error], [0.021, 1e-3 / 3**0.5], rtol=1e-6)
    stale = np.mean([0.1 * np.log2(1 + lag) / 4 for lag in LAGS[1:]])
    assert_close(first.stale, 0.421 - stale, rtol=1e-6)
    assert_close(first.kept_4, (0.421 - 0.1 * np.log2(5) / 4) / 0.421, rtol=1e-6)
    assert board.tied_with_first(runs, ranked) == ["tied"]
    broken = ranked[ranked.method == "broken"].iloc[0]
    assert_close([broken.lag_16, broken.collapsed], [0.2 / 3, 3 / 9], rtol=1e-6)
    said = " ".join(board.sentences(runs, ranked))
    assert "More than two errors above the default: `first`." in said and "end below where they began: `broken`" in said
    assert f"| 1 | `first` | {first.lag_0:.3f} ± " in board.table(ranked)


def test_samples_to_the_goal_are_those_of_the_policy_that_reached_it() -> None:
    runs = made({board.DEFAULT: by_lag(0.3, 0.4)})
    found = board.samples_to_goal(curves(runs, 20))
    assert found.samples.tolist() == [(20 - lag) * 128 for lag in LAGS for _ in range(2)]
    assert board.samples_to_goal(curves(runs, 99)).samples.isna().all()


def test_a_seed_without_all_its_runs_does_not_count() -> None:
    runs = made({board.DEFAULT: by_lag(0.3, 0.4), "other": by_lag(0.3, 0.4)})
    assert sorted(board.complete(runs[:-1]).seed.unique()) == [0]


def test_docs_and_sweep_are_made_from_the_committed_runs() -> None:
    runs, ranked = board.read()
    page = board.PAGE.read_text()
    assert page.split(board.BEGIN)[1].split(board.END)[0] == board.part(runs, ranked)
    assert board.SWEEP.read_text() == board.sweep(Study.read(board.HERE))
    assert load_config([]).algorithm.name == board.DEFAULT
    assert board.complete(runs).seed.nunique() >= 3


@pytest.mark.in_turn
@pytest.mark.more
def test_the_sweep_is_of_every_preset_with_a_ratio() -> None:
    ratio = {"mu", "prox", "prox_interp", "ema"}
    presets = [path.stem for path in (conf_folder() / "algorithm").glob("*.yaml")]
    found = {name: load_config([f"algorithm={name}"]).algorithm for name in presets}
    wanted = {
        name
        for name, a in found.items()
        if a.head == "policy" and a.advantage != "none" and (a.anchor in ratio or a.correction != "none")
    }
    wanted |= {name for name, a in found.items() if a.advantage == "vtrace"}  # whose ratio is in the advantage
    assert wanted | {"rloo"} == set(Study.read(board.HERE).methods)


@pytest.mark.parametrize("name", ["runs.csv", "curves.csv", "pilot.csv", "ranking.csv", "figure.png"])
def test_its_files_are_there(name: str) -> None:
    assert Path(board.HERE / name).stat().st_size > 1000


def test_runs_of_the_larger_model_are_allowed_and_shown_by_their_distance_to_the_default() -> None:
    large = import_module("experiments.36_leaderboard.smollm2")
    cells = list(large.grid())
    assert len(set(cells)) == len(cells) == 4 * len(large.METHODS)
    for cell in cells[: len(large.METHODS)]:
        config = load_config(large.overrides(cell))
        assert config.model.path == "smollm2" and config.async_.fixed_lag == 4
        assert (config.algorithm.num_iterations, config.algorithm.minibatches) == (1, 2)
    runs = pd.DataFrame(
        [
            {"method": method, "lag": lag, "seed": seed, "reward": base - lag / 100 + seed / 10}
            for method, base in ((board.DEFAULT, 0.5), ("opsm", 0.52))
            for lag in (0, 4)
            for seed in (0, 1)
        ]
    )
    first, second = large.show(runs).splitlines()[2:]
    assert first == "| `opsm` | 2 | 0.570 ± 0.050 | +0.020 ± 0.000 | 0.530 ± 0.050 | +0.020 ± 0.000 |"
    assert second == f"| `{board.DEFAULT}` | 2 | 0.550 ± 0.050 |  | 0.510 ± 0.050 |  |"
