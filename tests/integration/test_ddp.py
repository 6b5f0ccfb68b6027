"""Two gloo ranks against one: the same gradients, weights and metrics, whatever share each rank has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.data.packing import select
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.unit.learner.ranks import run_ranks
from tests.unit.learner.worlds import llama, random_batch, share

ALGORITHMS = {
    "decoupled_grpo": AlgorithmConfig(num_iterations=2),
    "ppo": AlgorithmConfig(advantage="gae", whiten=True, kl="loss", beta=0.1, entropy_coef=0.01),
    "rloo": AlgorithmConfig(advantage="loo", aggregate="seq_sum", kl="reward", beta=0.1),
    # What looks ahead: a threshold over all ranks' tokens, whole groups, and the rate by all ranks' sequences.
    "m2po": load_config(["algorithm=m2po"]).algorithm,
    "vcpo": load_config(["algorithm=vcpo"]).algorithm,
    "tba": load_config(["algorithm=tba"]).algorithm,
    "impact": load_config(["algorithm=impact"]).algorithm,
    # The batch's mean over all ranks. These batches are further from the model than its own threshold allows.
    "flash_reinforce": load_config(["algorithm=flash_reinforce", "algorithm.off_policy_mask_threshold=0.2"]).algorithm,
}
# A small budget gives the ranks different numbers of microbatches.
LEARNER = LearnerConfig(learning_rate=1e-2, token_budget=15)


def batches() -> list[TrainBatch]:
    """Balanced groups; one group, so that a rank has none; groups of uneven lengths; nothing but flat groups."""
    uneven = random_batch(5, 3, seed=3)
    return [random_batch(4, 3), random_batch(1, 4, seed=1), select(uneven, range(9)), random_batch(3, 2, flat_groups=3)]


def train(name: str, rank: int = 0, ranks: int = 1, folder: Path | None = None) -> dict[str, Any]:
    algorithm = ALGORITHMS[name]
    reference = llama(seed=4) if algorithm.needs_reference else None
    spec = BackendSpec(learner=replace(LEARNER, ranks=ranks), algorithm=algorithm, steps=10)
    trained = TorchBackend(llama(), spec, reference=reference, rank=rank, ranks=ranks)
    metrics = [trained.train_step(share(batch, rank, ranks)).metrics for batch in batches()]
    weights = {key: tensor.numpy().copy() for key, tensor in trained.parameters().items()}
    broken = random_batch(4, 3)
    broken.rewards[:] = np.where(broken.group_ids == share(broken, 0, 2).group_ids[0], broken.rewards, np.nan)
    skipped = trained.train_step(share(broken, rank, ranks)).skipped
    kept = all(np.array_equal(weights[key], tensor.numpy()) for key, tensor in trained.parameters().items())
    if folder is not None:
        trained.save(folder)
        trained.train_step(share(batches()[0], rank, ranks))
        trained.load(folder)
    return {"metrics": metrics, "weights": weights, "skipped": skipped and kept, "version": trained.policy_version}


def one_rank(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: train(name, rank, 2, folder / name) for name in ALGORITHMS}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, for every algorithm."""
    return run_ranks(one_rank, 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.more_but(every=3)
def test_two_ranks_equal_one(two_ranks: list[dict[str, Any]], name: str) -> None:
    alone = train(name)
    for rank in two_ranks:
        for found, expected in zip(rank[name]["metrics"], alone["metrics"], strict=True):
            assert_close(found, expected, rtol=2e-3, atol=2e-4)
        assert_close(rank[name]["weights"], alone["weights"], atol=2e-4)
        assert rank[name]["skipped"], "all skip when one finds a broken gradient"
        assert rank[name]["version"] == 5, "all resume at the saved version"
    first, second = (rank[name]["weights"] for rank in two_ranks)
    assert all(np.array_equal(first[key], second[key]) for key in first)
