"""Sampling against transformers' logits warpers, a sorted loop, chi-square tests and a Python-integer SplitMix64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from asyncrlhf.engines.hf.sampling import MAX_KEPT, Draws, penalise_repetition, sample_tokens, seed_state, uniforms
from asyncrlhf.errors import AsyncRLHFError
from tests.numeric import assert_close
from tests.truncated import kept_count

MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def rows(
    n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> tuple[np.ndarray, ...]:
    return np.full(n, temperature), np.full(n, top_p), np.full(n, top_k, np.int64), np.full(n, min_p)


def sets_of_draws(draws: Draws, vocabulary: int) -> list[set[int]]:
    """Of each row, the tokens that it could have been."""
    parts = draws.kept_ids.split(draws.kept_counts.tolist())
    return [set(part.tolist()) if len(part) else set(range(vocabulary)) for part in parts]


@given(seed=st.integers(0, 2**63 - 1), counter=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_uniforms_follow_splitmix64(seed: int, counter: int) -> None:
    golden = 0x9E3779B97F4A7C15
    state = splitmix64((seed + golden) & MASK)
    bits = splitmix64((state + golden * (counter + 1)) & MASK)
    drawn = uniforms(np.array([seed_state(seed)]), np.array([counter]))
    assert drawn[0] == ((bits >> 16) + 0.5) / 2**48
    assert 0 < drawn[0] < 1


def test_uniforms_are_uniform_and_unrelated_between_neighbours() -> None:
    states = np.array([seed_state(seed) for seed in range(200)])
    drawn = np.stack([uniforms(states, np.full(200, i)) for i in range(200)])
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    for shifted in (drawn[1:], drawn[:, 1:]):  # the next counter, the next seed
        correlation = np.corrcoef(drawn[: len(shifted), : shifted.shape[1]].ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 0.02


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_what_is_kept_is_what_transformers_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 50) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    uniform = np.random.default_rng(0).random(16)
    draws = sample_tokens(logits, uniform, *rows(16, temperature, top_p, top_k, min_p))
    assert sets_of_draws(draws, 50) == [set(row.isfinite().nonzero()[:, 0].tolist()) for row in expected]
    # A float32 log-softmax over 50 tokens, whose entries reach 20.
    own = expected.double().log_softmax(-1).gather(1, draws.tokens[:, None])[:, 0]
    assert_close(draws.logprobs.double(), own, atol=2e-5)


SETTINGS = [
    {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.8}, {"top_k": 7, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.05}, {"top_k": 30, "top_p": 1e-9},
    {"top_k": 2000}, {"top_p": 0.999},
]  # fmt: skip


@pytest.mark.parametrize("settings_", SETTINGS, ids=str)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["apart", "with ties"])
@pytest.mark.parametrize(("vocabulary", "spread"), [(40, 3.0), (3000, 3.0), (3000, 0.3)])
def test_the_kept_set_against_a_sorted_loop(
    settings_: dict[str, float], step: float, vocabulary: int, spread: float
) -> None:
    """Also where many tokens tie, where as many of them are kept as fit, and where the cap of 1,024 cuts."""
    logits = np.random.default_rng(1).normal(size=(6, vocabulary)).astype(np.float32) * spread
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    settings = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | settings_
    draws = sample_tokens(torch.from_numpy(logits), np.full(6, 0.7), *rows(6, **settings))  # type: ignore[arg-type]
    for row, token, logprob, kept in zip(
        logits, draws.tokens.tolist(), draws.logprobs.tolist(), sets_of_draws(draws, vocabulary), strict=True
    ):
        count, probabilities = kept_count(row, **settings)  # type: ignore[arg-type]
        assert len(kept) == count and token in kept
        np.testing.assert_array_equal(np.sort(row[list(kept)])[::-1], np.sort(row)[::-1][:count])
        place = int((np.sort(row[list(kept)])[::-1] > row[token]).sum())
        assert_close(logprob, np.log(probabilities[place]), atol=2e-5)
    binds = settings["top_k"] == 2000 or (settings["top_p"] == 0.999 and spread == 0.3)
    assert vocabulary < MAX_KEPT or not binds or int(draws.kept_counts.max()) == MAX_KEPT


def test_every_row_has_its_own_settings() -> None:
    """To the bit: what shares a batch with a row, truncated or not, is nothing to it."""
    torch.manual_seed(1)
    logits, uniform = torch.randn(6, 40) * 2, np.random.default_rng(2).random(6)
    settings_ = (
        np.array([0.5, 1.0, 2.0, 0.0, 1.3, 0.7]),
        np.array([1.0, 0.5, 0.9, 0.2, 1.0, 1.0]),
        np.array([3, 0, 10, 1, 0, 0]),
        np.array([0.0, 0.1, 0.0, 0.3, 0.0, 0.2]),
    )
    together = sample_tokens(logits, uniform, *settings_)
    kept = sets_of_draws(together, 40)
    assert together.kept_counts.gt(0).tolist() == [True, True, True, False, False, True]
    for i in range(6):
        part = slice(i, i + 1)
        alone = sample_tokens(logits[part], uniform[part], *(array[part] for array in settings_))
        assert torch.equal(together.tokens[part], alone.tokens)
        assert torch.equal(together.logprobs[part], alone.logprobs)
        assert kept[i] == sets_of_draws(alone, 40)[0]


def test_filters_that_are_off_keep_no_set() -> None:
    draws = sample_tokens(torch.randn(3, 20), np.full(3, 0.4), *rows(3, top_k=20))
    assert draws.kept_counts.tolist() == [0, 0, 0] and len(draws.kept_ids) == 0


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [(1.0, 1.0, 0, 0.0), (0.7, 0.9, 0, 0.0), (1.5, 0.95, 8, 0.0), (1.2, 1.0, 0, 0.15), (0.9, 0.9, 6, 0.1)],
)
def test_draws_follow_the_renormalised_distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    torch.manual_seed(3)
    n = 40_000
    row = torch.randn(12) * 1.5
    states = np.array([seed_state(11)]).repeat(n)
    settings_ = rows(n, temperature, top_p, top_k, min_p)
    draws = sample_tokens(row.expand(n, 12), uniforms(states, np.arange(n)), *settings_)
    _, probabilities = kept_count(row.numpy(), temperature, top_p, top_k, min_p)
    order = np.argsort(-row.numpy())
    counts = np.bincount(draws.tokens.numpy(), minlength=12)[order]
    assert (counts[len(probabilities) :] == 0).all()
    assert stats.chisquare(counts[: len(probabilities)], probabilities * n).pvalue > 1e-3
    expected = np.full(12, -np.inf)
    expected[order[: len(probabilities)]] = np.log(probabilities)
    assert_close(draws.logprobs.numpy(), expected[draws.tokens.numpy()], atol=1e-5)


def test_a_draw_at_either_end_takes_a_token_of_positive_probability() -> None:
    logits = torch.full((2, 6), float("-inf"))
    logits[:, 2], logits[:, 4] = 0.0, 1.0
    tokens = sample_tokens(logits, np.array([2.0**-49, 1 - 2.0**-49]), *rows(2)).tokens
    assert tokens.tolist() == [2, 4]


@pytest.mark.parametrize("vocabulary", [1025, 2048, 5003])
def test_draws_of_a_large_vocabulary_invert_the_cdf(vocabulary: int) -> None:
    """The token of draw u is the first whose cumulative probability passes u; found by blocks or not."""
    torch.manual_seed(7)
    logits = torch.randn(1, vocabulary) * 4
    logits[:, 300:900] = float("-inf")
    uniform = np.random.default_rng(0).random(500)
    tokens, logprobs = sample_tokens(logits.expand(500, -1), uniform, *rows(500))[:2]
    cdf = logits[0].double().softmax(-1).cumsum(-1).numpy()
    upper, lower = cdf[tokens], np.concatenate([[0.0], cdf])[tokens]
    assert (lower - 1e-6 <= uniform).all() and (uniform <= upper + 1e-6).all()
    assert torch.isfinite(logprobs).all()


def test_greedy_takes_the_argmax_and_reports_the_plain_logprob() -> None:
    torch.manual_seed(4)
    logits = torch.randn(8, 30)
    tokens, logprobs = sample_tokens(logits, np.full(8, 0.999), *rows(8, 0.0, 0.5, 3, 0.2))[:2]
    assert torch.equal(tokens, logits.argmax(-1))
    assert_close(logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.0, 0.9)])
@pytest.mark.parametrize("vocabulary", [19, 5000])
def test_logits_that_are_not_finite_are_named(bad: float, temperature: float, top_p: float, vocabulary: int) -> None:
    logits = torch.zeros(3, vocabulary)
    logits[1, 4] = bad
    one, off = np.ones(3), np.zeros(3)
    with pytest.raises(AsyncRLHFError, match="logits are not finite"):
        sample_tokens(logits, one * 0.5, one * temperature, one * top_p, off.astype(np.int64), off)


def test_the_repetition_penalty_is_transformers() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (4, 11)).astype(np.float32))
    texts = [rng.integers(0, 11, length) for length in (1, 6, 3, 9)]
    penalty = np.array([1.0, 1.3, 0.8, 2.0])
    expected = torch.stack(
        [
            RepetitionPenaltyLogitsProcessor(float(p))(torch.from_numpy(text)[None], row[None].clone())[0]
            for row, text, p in zip(logits, texts, penalty, strict=True)
        ]
    )
    kept = logits.clone()
    assert_close(penalise_repetition(logits, texts, penalty), expected)
    assert torch.equal(logits, kept), "the caller's logits stay"
