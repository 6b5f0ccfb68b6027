"""The study of compressed caches: what its ledger rewards, and that each of its runs is allowed."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.cache_config import read_cache

ledger = import_module("experiments.40_chunk_sink.ledger")
caches = import_module("experiments.40_chunk_sink.caches")
lab = import_module("experiments.40_chunk_sink.train")
both = import_module("experiments.40_chunk_sink.both")
tables = import_module("experiments.40_chunk_sink.tables")
RIGHT = "00+5=05 05+8=13 13+3=16 16+9=25 25+1=26 26+2=28 28+7=35 35+4=39 05 13 16 25 26 28 35 39"


def test_lines_and_repeated_totals_count_the_same() -> None:
    assert ledger.answer("58391274") == RIGHT and len(RIGHT) < ledger.LONGEST
    assert ledger.score("58391274=", RIGHT) == 1
    assert ledger.halves("58391274=", RIGHT[:-2] + "38") == (1.0, 7 / 8)
    assert ledger.halves("58391274=", RIGHT.replace("13+3=16", "13+3=17")) == (7 / 8, 1.0)
    assert ledger.reward(["58391274="], [""]) == [0.0]


def test_test_prompts_are_of_another_seed_and_the_same_each_time() -> None:
    assert ledger.prompts(2, 8) == ledger.prompts(2, 8) != ledger.prompts(1, 8)


@pytest.mark.parametrize("cell", list(caches.grid())[: 1 + len(caches.SHARES) * len(caches.POLICIES)], ids=str)
def test_each_share_leaves_something_to_choose_from(cell: object) -> None:
    cache = caches.cache_of(cell.policy, cell.share)  # type: ignore[attr-defined]
    if cache is not None:
        assert cache.budget(ledger.LONGEST) > cache.window + cache.every


@pytest.mark.parametrize("kind", ["boards", "words"])
def test_so_do_those_of_the_larger_model(kind: str) -> None:
    pytest.importorskip("reasoning_gym")
    large = import_module("experiments.40_chunk_sink.smollm2")
    assert large.task_of(kind).heldout_size == large.PROMPTS
    cells = list(large.grid())
    assert len(cells) == len(set(cells)) == 2 * 14
    for cell in cells:
        cache = caches.cache_of(cell.policy, cell.share, large.WINDOW, large.EVERY)
        assert cache is None or cache.budget(large.TASKS[kind][1]) > cache.window + cache.every


@pytest.mark.parametrize("arm", lab.ARMS, ids=str)
def test_runs_are_allowed_and_differ_by_their_arm_alone(arm: tuple[str, float, int, str]) -> None:
    config = load_config([*lab.overrides(lab.Cell(*arm, lab.RATE, 0)), "task.path=rows.jsonl", "run_dir=unused"])
    cache = read_cache(config.generator.cache, config.generator.max_completion_length)
    assert (cache is None) == (arm[0] == "full")
    assert cache is None or (cache.policy, cache.share) == (caches.POLICIES[arm[0]][0], arm[1])
    algorithm = config.algorithm
    assert algorithm.correction == {"none": "none", "tis": "truncate"}.get(arm[3], "mask")
    low = {"tail": 0.86, "icepop": 0.5, "seq_mask": 0.5, "geo_mask": 0.1}.get(arm[3], 0)
    level = {"seq_mask": "prod", "geo_mask": "geo"}.get(arm[3], "token")
    assert algorithm.correction_low == low and algorithm.correction_level == level
    assert algorithm.aggregate == "token"


def test_so_are_those_of_the_larger_model() -> None:
    pytest.importorskip("reasoning_gym")
    boards = import_module("experiments.40_chunk_sink.train_smollm2")
    cells = [*boards.grid(), *boards.pilot()]
    assert len(set(cells)) == len(cells) == 2 * len(boards.ARMS) + 2
    for cell in cells[: len(boards.ARMS)]:
        config = load_config([*boards.overrides(cell), "model.path=tiny", "run_dir=unused"])
        cache = read_cache(config.generator.cache, config.generator.max_completion_length)
        assert (cache is None) == (cell.cache == "full") and config.async_.fixed_lag == cell.lag
        assert cache is None or cache.budget(config.generator.max_completion_length) > cache.window + cache.every


def test_distances_add_up_where_they_should() -> None:
    """By seed: what both make together less the sum, and the effective share less the product."""
    rows = [
        (600, "full", 1.0, 0, 0.0, 1.0), (550, "full", 1.0, 0, 0.1, 0.5), (600, "window", 0.5, 0, 0.6, 0.4),
        (550, "window", 0.5, 0, 0.75, 0.15),
    ]  # fmt: skip
    (found,) = tables.added(pd.DataFrame(rows, columns=[*both.KEY, "kl", "ess"])).to_dict("records")
    assert (found["steps"], found["cache"], found["kl_age"], found["kl_cache"]) == (550, "window", 0.1, 0.6)
    assert found["kl_more_than_sum"] == pytest.approx(0.05) and found["ess_less_product"] == pytest.approx(-0.05)


def test_distances_are_those_of_their_definitions() -> None:
    sampler, policy = [np.log([0.5, 0.25])], [np.log([0.25, 0.5])]
    found = both.distance(policy, sampler)
    assert found["kl"] == pytest.approx(((0.5 - 1 - np.log(0.5)) + (2 - 1 - np.log(2))) / 2)
    assert found["ess"] == pytest.approx(2.5**2 / 2 / 4.25) and found["low"] == pytest.approx(np.exp(np.log(2) * -0.9))
