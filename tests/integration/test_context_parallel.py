"""Ranks that split the tokens of one batch: the curve and the weights of one plain rank, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.truncated import with_sets
from tests.unit.learner.ranks import STEPS, assert_curve, batches, build, curve, run_ranks, weights
from tests.unit.learner.worlds import VOCABULARY, random_batch

SAVED_AFTER = 6
# Weights that stay as they are: what differs is the gradient's own rounding. Updates amplify it: after 20 steps, the
# gradient norm of one rank whose weights began one rounding off differs by 4.5e-4, that of two plain ranks by 1.1e-4,
# that of a ring of two by 3.3e-4; with weights that stay, the ring's by 1.8e-6.
STILL = {"learning_rate": 1e-30}
SHORT_STEPS = 3
PPO = AlgorithmConfig(advantage="gae", whiten=True, kl="loss", beta=0.1, num_iterations=2)
VCPO = load_config(["algorithm=vcpo"]).algorithm  # asks for the collision probability and looks ahead
CASES: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "ppo": (PPO, {"gradient_checkpointing": True}),
    "impact": (load_config(["algorithm=impact"]).algorithm, {}),
    "vcpo, fsdp2": (VCPO, {"sharding": "fsdp2"}),
    "ppo, fsdp2": (PPO, {"sharding": "fsdp2", "gradient_reduction": "update"}),
}
KL = AlgorithmConfig(kl="loss", beta=0.1)
QUICK: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "context": (PPO, {"context_parallel_size": 2}),
    "pipeline": (KL, {"pipeline_parallel_size": 2}),  # all its other tests: test_pipeline_parallel.py
}


def short() -> list[TrainBatch]:
    """All but the first as truncated sampling would give them; the second has one group."""
    plain, *others = batches(SHORT_STEPS)
    return [plain, *(with_sets(batch, VOCABULARY) for batch in others)]


def kept_bytes(trained: TorchBackend) -> int:
    """What autograd keeps of one pass over a batch for its backward pass, weights aside."""
    weights = {parameter.data_ptr() for parameter in trained.policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = PackedInputs.of_batch(random_batch(4, 3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        facts = trained.policy(inputs, 1.0)
        facts.logprobs.sum().backward()
    return sum(kept.values())


def job(rank: int, folder: Path) -> dict[str, Any]:
    trained, given = build(rank, 2, context_parallel_size=2), batches()
    found: dict[str, Any] = {"curve": curve(trained, given[:SAVED_AFTER], rank, 2)}
    trained.save(folder)
    found["curve"] += curve(trained, given[SAVED_AFTER:], rank, 2)
    found["weights"] = weights(trained)
    found["still"] = curve(build(rank, 2, context_parallel_size=2, **STILL), given, rank, 2)
    for name, (algorithm, settings) in CASES.items():
        found[name] = curve(build(rank, 2, algorithm, context_parallel_size=2, **settings), short(), rank, 2)
    return found


def quick(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"kept": kept_bytes(build(rank, 2, context_parallel_size=2))}
    for name, (algorithm, settings) in QUICK.items():
        found[name] = curve(build(rank, 2, algorithm, **settings), short()[:2], rank, 2)
    found["still"] = curve(build(rank, 2, context_parallel_size=2, **STILL), batches(4), rank, 2)
    return found


def assert_gradients(found: list[dict[str, float]], steps: int) -> None:
    """The gradients' norms are those of one rank that has all tokens."""
    for one, wanted in zip(found, curve(build(**STILL), batches(steps)), strict=True):
        assert_close(one["grad_norm"], wanted["grad_norm"], rtol=1e-5, atol=1e-6)
        assert_close(one["loss"], wanted["loss"], atol=1e-6)


def test_two_ranks_make_two_steps_of_one_and_keep_half_of_the_activations() -> None:
    ranks, whole = run_ranks(quick, 2), kept_bytes(build())
    assert all(rank["kept"] < 0.6 * whole for rank in ranks)
    for name, (algorithm, _) in QUICK.items():
        expected = curve(build(algorithm=algorithm), short()[:2])
        for rank in ranks:
            assert_curve(rank[name], expected, rtol=2e-3, atol=2e-4)
    assert_gradients(ranks[0]["still"], 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(job, 2, folder)


@pytest.mark.thorough
def test_two_ranks_make_the_curve_and_the_weights_of_one(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    alone = build()
    expected = curve(alone, batches())
    for rank in two_ranks:
        assert len(rank["curve"]) == STEPS
        assert_curve(rank["curve"], expected)
        assert_close(rank["weights"], weights(alone), atol=1e-4)
    assert_gradients(two_ranks[0]["still"], STEPS)
    first, second = (rank["weights"] for rank in two_ranks)
    assert all(np.array_equal(first[key], second[key]) for key in first)
    resumed = build()  # in another layout: one rank that has all tokens
    resumed.load(folder)
    assert_curve(curve(resumed, batches()[SAVED_AFTER:]), expected[SAVED_AFTER:])


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_other_algorithms_and_shards_too(two_ranks: list[dict[str, Any]], name: str) -> None:
    expected = curve(build(algorithm=CASES[name][0]), short())
    assert ["truncation_mass" in metrics for metrics in expected] == [False, True, True]
    for rank in two_ranks:
        assert_curve(rank[name], expected, rtol=2e-3, atol=2e-4)


def four(rank: int) -> dict[str, Any]:
    """Two shares of two ranks each, and one share of four, whose sequences are shorter than the ring is long."""
    found: dict[str, Any] = {}
    for size in (2, 4):
        trained = build(rank, 4, context_parallel_size=size)
        found[str(size)] = curve(trained, batches(), rank, 4), weights(trained)
    return found


@pytest.mark.thorough
def test_four_ranks_in_rings_of_two_and_of_four() -> None:
    alone = build()
    expected = curve(alone, batches())
    for rank in run_ranks(four, 4):
        for metrics, found in rank.values():
            assert_curve(metrics, expected)
            assert_close(found, weights(alone), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ranks": 3, "context_parallel_size": 2}, r"context_parallel_size=2 does not divide learner\.ranks=3"),
        ({"ranks": 2, "context_parallel_size": 2, "backend": "deepspeed"}, r"context_parallel_size=2 needs .*=torch"),
        ({"context_parallel_size": 0}, r"learner\.context_parallel_size=0 is out of range"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LearnerConfig(**settings)
