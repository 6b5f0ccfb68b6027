"""Rates of one side alone: what they count when responses end one by one, in waves, or too early."""

from __future__ import annotations

import importlib

import pytest

from asyncrlhf.errors import AsyncRLHFError

rate = importlib.import_module("experiments.12_overlap.bench").rate


def test_a_rate_is_the_same_for_waves_and_for_a_stream() -> None:
    waves = [float(1 + i // 128) + 0.001 * (i % 3) for i in range(128 * 40)]  # a wave each second
    assert rate(sorted(waves), 5 * 128) == pytest.approx(128, rel=0.005)
    assert rate([i / 50 for i in range(1000)], 100) == pytest.approx(50)


def test_a_rate_needs_responses_after_the_warm_up() -> None:
    with pytest.raises(AsyncRLHFError, match="more steps, or fewer slots"):
        rate([5.0] * 16 + [10.0] * 32 + [10.01] * 2, 16)
    with pytest.raises(AsyncRLHFError, match="more steps, or fewer slots"):
        rate([5.0] * 50, 16)
