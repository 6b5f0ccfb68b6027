"""Answers cut at the length limit: kept, masked out of the loss, or continued by the critic's value."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from asyncrlhf.data.packing import select
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import TrainBatch
from tests.unit.learner.worlds import assert_same, backend, gradients, llama, random_batch

RAW = AlgorithmConfig(advantage="raw", anchor="self", coef="one", correction="none")
CRITICS = {
    "gae": AlgorithmConfig(advantage="gae", lam=0.9, gamma=0.95),
    "uncorrected gae": AlgorithmConfig(advantage="gae", correction="none", gamma=0.95),
    "vtrace": AlgorithmConfig(advantage="vtrace", anchor="self", coef="one", correction="none", gamma=0.95),
}


def batch_with_cuts() -> TrainBatch:
    return dataclasses.replace(random_batch(4, 3, seed=8), truncated=np.arange(12) % 4 < 2)


def all_gradients(trained: TorchBackend) -> dict[str, torch.Tensor]:
    """Of the policy, and of the critic where there is one."""
    if trained.critic is None:
        return gradients(trained)
    critic = {f"critic.{name}": p.grad.clone() for name, p in trained.critic.named_parameters()}
    return gradients(trained) | critic


def step(algorithm: AlgorithmConfig, batch: TrainBatch, budget: int = 10_000) -> dict[str, torch.Tensor]:
    still = LearnerConfig(learning_rate=0.0, critic_learning_rate=1e-9, max_grad_norm=0.0, token_budget=budget)
    trained = backend(algorithm, still)
    if trained.critic is not None:  # a value head of zeros would make every value equal
        torch.manual_seed(1)
        torch.nn.init.normal_(trained.critic.head.weight, std=0.3)
    trained.train_step(batch)
    return all_gradients(trained)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest, as a share of the largest entry of ``b``."""
    return max(float((a[k] - b[k]).abs().max()) for k in b) / max(float(x.abs().max()) for x in b.values())


# --- mask ------------------------------------------------------------------------------------------------------------


def test_a_masked_answer_leaves_loss_and_normaliser() -> None:
    """With rewards as advantages the step is that of the batch without it, as in TRL's mask_truncated_completions."""
    batch, algorithm = batch_with_cuts(), dataclasses.replace(RAW, truncated="mask")
    rest = select(batch, np.flatnonzero(~batch.truncated))
    assert_same(step(algorithm, batch), step(RAW, rest))
    assert_same(step(algorithm, batch, budget=20), step(RAW, rest))


def test_a_masked_answer_stays_in_its_group() -> None:
    """Its reward is its siblings' baseline; its tokens have no gradient."""
    batch = batch_with_cuts()
    algorithm = AlgorithmConfig(truncated="mask")
    hidden = dataclasses.replace(
        batch, loss_mask=batch.loss_mask & ~np.repeat(batch.truncated, np.diff(batch.cu_seqlens))
    )
    assert_same(step(algorithm, batch), step(AlgorithmConfig(), hidden))
    better = dataclasses.replace(batch, rewards=np.where(batch.truncated, batch.rewards + 1, batch.rewards))
    assert difference(step(algorithm, better), step(algorithm, batch)) > 0.01


# --- bootstrap -------------------------------------------------------------------------------------------------------


def values_behind(batch: TrainBatch) -> np.ndarray:
    """The critic's value of the state behind each whole answer, by a plain forward pass: [N]."""
    made = backend(CRITICS["gae"])
    assert made.critic is not None
    torch.manual_seed(1)
    torch.nn.init.normal_(made.critic.head.weight, std=0.3)
    plain = llama().base_model
    found = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        with torch.no_grad():
            hidden = plain(input_ids=torch.from_numpy(batch.token_ids[start:end])[None]).last_hidden_state
            found.append(float(made.critic.head(hidden[0, -1])))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("budget", [10_000, 20])
@pytest.mark.parametrize("name", CRITICS)
def test_bootstrapping_is_a_score_of_the_value_behind_the_cut(name: str, budget: int) -> None:
    """The state behind a cut answer is worth its value, one step on, and the score of the stump counts nothing."""
    batch, algorithm = batch_with_cuts(), CRITICS[name]
    batch = dataclasses.replace(batch, loss_mask=batch.response_mask)
    worth = algorithm.gamma * values_behind(batch)
    scored = dataclasses.replace(batch, rewards=np.where(batch.truncated, worth, batch.rewards).astype(np.float32))
    bootstrapped = step(dataclasses.replace(algorithm, truncated="bootstrap"), batch, budget)
    assert_same(bootstrapped, step(algorithm, scored), tolerance=2e-5)
    assert difference(bootstrapped, step(algorithm, batch)) > 0.05


def test_bootstrapping_without_a_cut_answer_changes_nothing() -> None:
    batch = dataclasses.replace(batch_with_cuts(), truncated=np.zeros(12, dtype=np.bool_))
    algorithm = CRITICS["gae"]
    assert_same(step(dataclasses.replace(algorithm, truncated="bootstrap"), batch), step(algorithm, batch), tolerance=0)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_has_no_critic_cannot_bootstrap_and_what_compares_answers_keeps_them() -> None:
    with pytest.raises(ConfigError, match=r"truncated=bootstrap needs a critic.*allowed: keep or mask"):
        AlgorithmConfig(truncated="bootstrap")
    pair = {"head": "pair", "advantage": "raw", "coef": "one", "correction": "none", "anchor": "ref", "beta": 0.1}
    with pytest.raises(ConfigError, match=r"truncated=mask has no place in algorithm.head=pair.*truncated=keep"):
        AlgorithmConfig(**pair, aggregate="seq_sum", truncated="mask")
