"""Standard errors over prompts, against NumPy, a bootstrap over prompts, and the calibration of a score."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from asyncrlhf.stages.reward_model import plain_words
from asyncrlhf.stages.statistics import agreement, estimate
from tests.numeric import assert_close


def test_one_value_a_prompt_is_the_usual_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=37)
    found = estimate(values.tolist())
    assert found is not None and found.n == 37
    assert_close(found.mean, values.mean())
    assert_close(found.standard_error, values.std(ddof=1) / np.sqrt(37))
    shuffled = estimate(values.tolist(), list(range(36, -1, -1)))
    assert_close(shuffled, found)


def test_copies_of_a_value_bring_no_certainty() -> None:
    values = np.random.default_rng(1).normal(size=25)
    once = estimate(values.tolist())
    often = estimate(np.repeat(values, 8).tolist(), np.repeat(np.arange(25), 8).tolist())
    assert once is not None and often is not None
    assert_close(often.standard_error, once.standard_error)
    alone = estimate(np.repeat(values, 8).tolist())
    assert alone is not None and alone.standard_error is not None and once.standard_error is not None
    assert alone.standard_error < 0.5 * once.standard_error


def test_unequal_prompts_agree_with_a_bootstrap_over_prompts() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 7, size=80)
    prompts = np.repeat(np.arange(80), sizes)
    values = rng.normal(size=80)[prompts] + 0.3 * rng.normal(size=len(prompts))
    found = estimate(values.tolist(), prompts.tolist())
    sums, counts = np.bincount(prompts, values), np.bincount(prompts)
    draws = rng.integers(0, 80, size=(4000, 80))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    assert found is not None and found.standard_error == pytest.approx(means.std(), rel=0.06)


def test_too_little_to_say() -> None:
    assert estimate([]) is None
    one = estimate([2.0, 3.0], [7, 7])
    assert one is not None and (one.mean, one.standard_error, one.text()) == (2.5, None, "2.500")


def test_agreement_by_hand() -> None:
    found = agreement([2.0, 1.0, 0.5, 0.0], [0.0, 3.0, 0.5, -1.0], [0, 0, 1, 2])
    assert found["pairs"] == 4 and found["accuracy"] == (1 + 0 + 0.5 + 1) / 4
    assert_close(found["margin_mean"], (2 - 2 + 0 + 1) / 4)
    # Sums of the residuals by prompt: (1 + 0 - 2 * 0.625, 0.5 - 0.625, 1 - 0.625).
    residuals = np.array([-0.25, -0.125, 0.375])
    assert_close(found["accuracy_standard_error"], np.sqrt((residuals**2).sum() * 3 / 2) / 4)
    assert [row["pairs"] for row in found["calibration"]] == [1, 1, 1, 1]
    assert [row["accuracy"] for row in found["calibration"]] == [0.5, 1.0, 1.0, 0.0]
    assert_close(found["calibration"][1]["expected"], 1 / (1 + np.exp(-1.0)))


def test_a_model_that_is_right_about_itself_is_calibrated() -> None:
    """Labels drawn by the Bradley-Terry model of the scores: in each bin the share of right ones is as expected."""
    rng = np.random.default_rng(3)
    margin = rng.normal(scale=2.0, size=40_000)
    flipped = rng.random(len(margin)) > 1 / (1 + np.exp(-np.abs(margin)))
    margin = np.where(flipped, -np.abs(margin), np.abs(margin))
    found = agreement(margin.tolist(), np.zeros(len(margin)).tolist(), list(range(len(margin))))
    assert len(found["calibration"]) == 5
    for row in found["calibration"]:
        assert row["pairs"] == 8000 and row["accuracy"] == pytest.approx(row["expected"], abs=0.025)
    edges = [(row["margin_low"], row["margin_high"]) for row in found["calibration"]]
    assert all(high <= low for (_, high), (low, _) in pairwise(edges))


def test_small_margins_and_single_pairs_are_told() -> None:
    found = agreement([0.0012, 0.5], [0.0, 0.0], [0, 1])
    summary = {"steps": 3, "data": {"train": 1, "identical": 0, "too_long": 0}, "heldout": found, "model_dir": "here"}
    lines = plain_words(summary).splitlines()
    assert lines[0] == "Done: 3 steps on 1 pair." and "on 2 pairs, mean margin 0.251." in lines[1]
    assert lines[2].startswith("  margin 0.0012 to 0.0012: right 1.00") and lines[2].endswith("(1 pair)")
