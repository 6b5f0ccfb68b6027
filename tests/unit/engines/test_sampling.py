"""Sampling against transformers' logits warpers, chi-square tests and a Python-integer SplitMix64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncrlhf.engines.sampling import process_logits, sample_tokens, seed_state, uniforms
from tests.numeric import assert_close

MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def rows(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> tuple[np.ndarray, ...]:
    return np.full(n, temperature), np.full(n, top_p), np.full(n, top_k, np.int64)


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
def test_processed_logprobs_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 50) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    processed = process_logits(logits, *rows(16, temperature, top_p, top_k))
    assert_close(processed, expected.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_every_row_has_its_own_settings() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 40) * 2
    temperature = np.array([0.5, 1.0, 2.0, 0.0, 1.3])
    top_p = np.array([1.0, 0.5, 0.9, 0.2, 1.0])
    top_k = np.array([3, 0, 10, 1, 0])
    together = process_logits(logits, temperature, top_p, top_k)
    for i in range(5):
        alone = process_logits(logits[i : i + 1], temperature[i : i + 1], top_p[i : i + 1], top_k[i : i + 1])
        assert_close(together[i], alone[0], atol=1e-5)


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_top_p_of_a_large_vocabulary(spread: float) -> None:
    """Flat logits need more than the first candidates, peaked ones do not; both agree with a full sort."""
    torch.manual_seed(6)
    logits = torch.randn(3, 5000) * spread
    processed = process_logits(logits, *rows(3, top_p=0.8))
    expected = TopPLogitsWarper(0.8)(None, logits.double()).log_softmax(-1).float()
    assert_close(processed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 0.95, 8)])
def test_draws_follow_the_processed_distribution(temperature: float, top_p: float, top_k: int) -> None:
    torch.manual_seed(3)
    n = 40_000
    logits = (torch.randn(12) * 1.5).expand(n, 12)
    settings_ = rows(n, temperature, top_p, top_k)
    states = np.array([seed_state(11)]).repeat(n)
    tokens, logprobs = sample_tokens(logits, uniforms(states, np.arange(n)), *settings_)
    reference = process_logits(logits[:1], *(array[:1] for array in settings_))[0]
    assert_close(logprobs, reference[tokens], atol=1e-5)
    counts = np.bincount(tokens.numpy(), minlength=12)
    expected = reference.exp().double().numpy() * n
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    assert stats.chisquare(counts[kept], expected[kept] * counts.sum() / expected[kept].sum()).pvalue > 1e-3


def test_a_draw_at_either_end_takes_a_token_of_positive_probability() -> None:
    logits = torch.full((2, 6), float("-inf"))
    logits[:, 2], logits[:, 4] = 0.0, 1.0
    tokens, _ = sample_tokens(logits, np.array([2.0**-49, 1 - 2.0**-49]), *rows(2))
    assert tokens.tolist() == [2, 4]


@pytest.mark.parametrize("vocabulary", [1025, 2048, 5003])
def test_draws_of_a_large_vocabulary_invert_the_cdf(vocabulary: int) -> None:
    """The token of draw u is the first whose cumulative probability passes u; found by blocks or not."""
    torch.manual_seed(7)
    logits = torch.randn(1, vocabulary) * 4
    logits[:, 300:900] = float("-inf")
    uniform = np.random.default_rng(0).random(500)
    tokens, logprobs = sample_tokens(logits.expand(500, -1), uniform, *rows(500))
    cdf = logits[0].double().softmax(-1).cumsum(-1).numpy()
    upper, lower = cdf[tokens], np.concatenate([[0.0], cdf])[tokens]
    assert (lower - 1e-6 <= uniform).all() and (uniform <= upper + 1e-6).all()
    assert torch.isfinite(logprobs).all()


def test_greedy_takes_the_argmax_and_reports_the_plain_logprob() -> None:
    torch.manual_seed(4)
    logits = torch.randn(8, 30)
    temperature, top_p, top_k = rows(8, 0.0, 0.5, 3)
    tokens, logprobs = sample_tokens(logits, np.full(8, 0.999), temperature, top_p, top_k)
    assert torch.equal(tokens, logits.argmax(-1))
    assert_close(logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-5)
