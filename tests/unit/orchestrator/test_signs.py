"""TOPR's missing branch is said once, and only where it is missing."""

from __future__ import annotations

import dataclasses

import numpy as np

from asyncrlhf.orchestrator.learning.signs import METRIC, STEPS, MissingSign
from tests.unit.learner.test_presets import preset, step
from tests.unit.learner.worlds import random_batch


def said(name: str, shares: list[float]) -> list[int]:
    """The steps after which a sentence came."""
    watch = MissingSign(preset(name))
    return [index for index, share in enumerate(shares) if watch.observe({METRIC: share}) is not None]


def test_one_sentence_after_the_first_steps_without_a_negative_advantage() -> None:
    assert said("topr", [0.0] * 3 * STEPS) == [STEPS - 1]
    assert said("topr", [0.0] * (STEPS - 1) + [0.1] + [0.0] * 3 * STEPS) == []
    assert said("topr", [0.5] + [0.0] * 3 * STEPS) == []
    assert said("reinforce", [0.0] * 3 * STEPS) == []


def test_the_share_is_that_of_the_tokens_that_train() -> None:
    batch = random_batch()
    signs = np.where(np.arange(batch.num_sequences) % 3 == 0, -1, 1).astype(np.float32)
    negative = np.repeat(signs < 0, np.diff(batch.cu_seqlens))[batch.loss_mask].mean()
    for rewards, expected in ((signs, negative), (np.abs(signs), 0.0)):
        metrics = step(preset("topr"), dataclasses.replace(batch, rewards=rewards))[1]
        np.testing.assert_allclose(metrics[METRIC], expected, rtol=1e-6)
