"""Gradients of a learner step against a plain transformers forward, and what must not change them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from asyncrlhf.data.packing import select
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step import plan as plan_module
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.unit.learner.worlds import assert_same, backend, gradients, llama, plain_logprobs, random_batch

GRPO = AlgorithmConfig()
STILL = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0)


def response_part(batch: TrainBatch, array: np.ndarray, row: int) -> torch.Tensor:
    part = slice(batch.cu_seqlens[row], batch.cu_seqlens[row + 1])
    return torch.from_numpy(array[part][batch.response_mask[part]])


def group_norm(batch: TrainBatch, eps: float = 1e-4) -> list[float]:
    """(R - mean) / (std + eps), written as the paper writes it, one rollout at a time."""
    found = []
    for reward, group in zip(batch.rewards, batch.group_ids, strict=True):
        siblings = batch.rewards[batch.group_ids == group].astype(np.float64)
        found.append(float((reward - siblings.mean()) / (siblings.std(ddof=1) + eps)))
    return found


def plain_decoupled_grpo(batch: TrainBatch, temperature: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Decoupled PPO's loss at theta = prox, token mean, tokens with w > 5 masked: (loss, gradients)."""
    model = llama()
    total, tokens = torch.zeros(()), 0
    advantages = group_norm(batch)
    for row, theta in enumerate(plain_logprobs(model, batch, temperature)):
        mask = response_part(batch, batch.loss_mask, row)
        weight = (theta.detach() - response_part(batch, batch.behavior_logprobs, row)).exp()
        weight = torch.where(weight > 5.0, 0.0, weight)
        ratio = (theta - theta.detach()).exp()
        total = total - (weight * ratio * advantages[row] * batch.weights[row].item() * mask).sum()
        tokens += int(mask.sum())
    loss = total / tokens
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradient_equals_that_of_a_padded_forward(temperature: float) -> None:
    batch = random_batch()
    trained = backend(GRPO, temperature=temperature)
    result = trained.train_step(batch)
    loss, expected = plain_decoupled_grpo(batch, temperature)
    assert_close(result.metrics["loss"], loss, atol=1e-5)
    assert_same(gradients(trained), expected)
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert_close(result.metrics["grad_norm"], float(norm), rtol=1e-4)


# What no preset switches on; those are in test_presets.py.
VARIANTS = {
    "dr_grpo": AlgorithmConfig(advantage="group_mean", aggregate="const", whiten=True),
    "kl in the loss": AlgorithmConfig(kl="loss", beta=0.1, entropy_coef=0.01),
    "kl in the reward": AlgorithmConfig(advantage="loo", kl="reward", beta=0.1),
    "ppo": AlgorithmConfig(advantage="gae", lam=0.95, kl="reward", beta=0.1),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.more_but(every=3)
def test_microbatches_do_not_change_the_gradient(name: str) -> None:
    batch = random_batch(5, 3, seed=2, flat_groups=2)
    found = []
    for budget in (10_000, 20, 1):
        learner = dataclasses.replace(STILL, token_budget=budget)
        trained = backend(VARIANTS[name], learner, reference=llama(seed=5), max_completion_length=9)
        metrics = trained.train_step(batch).metrics
        found.append((gradients(trained), metrics))
    for gradient, metrics in found[1:]:
        assert_same(gradient, found[0][0], tolerance=2e-5)
        assert_close(metrics, found[0][1], rtol=1e-3, atol=1e-4)


def test_sequences_without_gradient_are_spared_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(5, 3, seed=2, flat_groups=2)
    assert plan_module.zero_gradient_sequences(batch, GRPO).tolist() == [True] * 6 + [False] * 9
    spared = backend(GRPO)
    metrics = spared.train_step(batch).metrics
    monkeypatch.setattr(plan_module, "zero_gradient_sequences", lambda batch, _: np.zeros(batch.num_sequences, bool))
    full = backend(GRPO)
    assert_close(full.train_step(batch).metrics, metrics, rtol=1e-4, atol=1e-5)
    assert_same(gradients(spared), gradients(full))
    assert_close(metrics["zero_spread_groups"], 0.4)


@pytest.mark.parametrize(
    "algorithm", [AlgorithmConfig(entropy_coef=0.1), AlgorithmConfig(kl="loss", beta=1.0), AlgorithmConfig(whiten=True)]
)
def test_no_sequence_is_spared_when_another_term_gives_it_a_gradient(algorithm: AlgorithmConfig) -> None:
    assert not plan_module.zero_gradient_sequences(random_batch(flat_groups=2), algorithm).any()


def test_only_flat_groups_give_a_zero_gradient_and_a_step_all_the_same() -> None:
    trained = backend(GRPO)
    result = trained.train_step(random_batch(2, 3, flat_groups=2))
    assert not result.skipped and trained.policy_version == 1 and result.metrics["grad_norm"] == 0.0


def test_the_order_of_the_batch_does_not_matter() -> None:
    batch = random_batch(seed=4)
    order = np.random.default_rng(0).permutation(batch.num_sequences)
    one, other = backend(GRPO), backend(GRPO)
    one.train_step(batch)
    other.train_step(select(batch, order))
    assert_same(gradients(other), gradients(one))


def test_proximal_policy_is_the_one_before_the_step() -> None:
    """Two iterations in one batch: in the second, the ratio and the clip speak of the first's weights."""
    batch = random_batch(seed=6)
    algorithm = AlgorithmConfig(num_iterations=2, epsilon=1e-3, epsilon_high=1e-3)
    moving = backend(algorithm, LearnerConfig(learning_rate=3e-2, max_grad_norm=0.0))
    before = torch.cat(plain_logprobs(llama(), batch)).detach()
    metrics = moving.train_step(batch).metrics
    mask = torch.from_numpy(batch.loss_mask[batch.response_mask])
    behavior = torch.from_numpy(batch.behavior_logprobs[batch.response_mask])
    drift = (before - behavior)[mask]
    assert_close(metrics["behavior_log_ratio_mean"], float(drift.mean()), atol=1e-4)
    weights = drift.exp()
    ess = float(weights.sum() ** 2 / weights.square().sum() / len(weights))
    assert_close(metrics["ess_fraction"], ess, rtol=1e-3)
    assert metrics["policy_log_ratio_abs_max"] > 0.01 and metrics["clip_fraction"] > 0.1
    expected_kl = float((weights - 1 - drift).mean())
    assert_close(metrics["behavior_kl"], expected_kl, rtol=1e-3)


def test_minibatches_record_the_policy_before_the_first_update() -> None:
    batch = random_batch(seed=6)
    before = torch.cat(plain_logprobs(llama(), batch)).detach()
    moving = backend(AlgorithmConfig(minibatches=3), LearnerConfig(learning_rate=3e-2))
    metrics = moving.train_step(batch).metrics
    mask = torch.from_numpy(batch.loss_mask[batch.response_mask])
    behavior = torch.from_numpy(batch.behavior_logprobs[batch.response_mask])
    assert_close(metrics["behavior_log_ratio_mean"], float((before - behavior)[mask].mean()), atol=1e-4)
    assert metrics["policy_log_ratio_abs_max"] > 0.01


def test_reference_kl_is_zero_at_the_reference_and_counts_away_from_it() -> None:
    batch, algorithm = random_batch(), AlgorithmConfig(kl="loss", beta=0.1)
    assert_close(backend(algorithm, reference=llama()).train_step(batch).metrics["ref_kl"], 0, atol=1e-9)
    assert backend(algorithm, reference=llama(seed=1)).train_step(batch).metrics["ref_kl"] > 0.01
