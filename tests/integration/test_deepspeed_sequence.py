"""Four ranks that split the tokens of two shares: the same curve as one plain rank."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.types import TrainBatch
from tests.truncated import with_sets
from tests.unit.learner.ranks import assert_curve, batches, build, curve, run_ranks
from tests.unit.learner.worlds import VOCABULARY

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

RANKS, STEPS = 4, 3
PPO = AlgorithmConfig(advantage="gae", whiten=True, kl="loss", beta=0.1, num_iterations=2)
VCPO = load_config(["algorithm=vcpo"]).algorithm  # asks for the collision probability and looks ahead
CASES: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "zero 1, vcpo": (VCPO, {"zero_stage": 1}),
    "zero 3, ppo": (PPO, {"zero_stage": 3, "gradient_checkpointing": True}),
}


def given() -> list[TrainBatch]:
    """All but the first as truncated sampling would give them; in the second a share is empty."""
    plain, *others = batches(STEPS)
    return [plain, *(with_sets(batch, VOCABULARY) for batch in others)]


def job(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (algorithm, settings) in CASES.items():
        trained = build(rank, RANKS, algorithm, backend="deepspeed", sequence_parallel_size=2, **settings)
        found[name] = curve(trained, given(), rank, RANKS)
    return found


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(job, RANKS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_split_sequences_make_the_curve_of_one(four_ranks: list[dict[str, Any]], name: str) -> None:
    expected = curve(build(algorithm=CASES[name][0]), given())
    assert ["truncation_mass" in metrics for metrics in expected] == [False, True, True]
    for rank in four_ranks:
        assert_curve(rank[name], expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ranks": 2, "sequence_parallel_size": 2}, r"sequence_parallel_size=2 needs learner\.backend=deepspeed"),
        ({"ranks": 3, "sequence_parallel_size": 2, "backend": "deepspeed"}, r"=2 does not divide learner\.ranks=3"),
        ({"sequence_parallel_size": 0}, r"learner\.sequence_parallel_size=0 is out of range"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LearnerConfig(**settings)
