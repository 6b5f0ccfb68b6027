"""A KL in the reward holds the policy at the reference: nothing but the KL is rewarded, at several lags and seeds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.orchestrator.compose import load_config
from tests.unit.learner.bandit import Table, policy, sampled

STEPS, WINDOW, SEEDS, SPREAD = 150, 20, 5, 0.1
RATE = 3e-3


def with_kl(name: str) -> AlgorithmConfig:
    return dataclasses.replace(load_config([f"algorithm={name}"]).algorithm, kl="reward", beta=1.0)


def divergences(algorithm: AlgorithmConfig, lag: int, seed: int, rate: float = RATE) -> np.ndarray:
    """KL to the reference in nats before each step, every task reward 0 and every batch ``lag`` steps old: [STEPS]."""
    reference, shadow = policy(100 + seed, SPREAD), policy(seed, SPREAD)
    with torch.no_grad():
        goal = Table.of(reference)
    rates = LearnerConfig(learning_rate=rate, critic_learning_rate=10 * rate, lr_schedule="linear")
    trained = TorchBackend(policy(seed, SPREAD), rates, algorithm, steps=STEPS, reference=reference)
    draws, tables, found = np.random.default_rng(seed), [], []
    for version in range(STEPS):
        shadow.load_state_dict(trained.model.state_dict())
        with torch.no_grad():
            tables.append(Table.of(shadow))
            found.append(float(tables[-1].kl(goal)))
        born = max(0, version - lag)
        trained.train_step(sampled(tables[born], 16, 4, draws, born, lambda _: 0.0))
    return np.array(found)


def assert_held(curves: np.ndarray) -> None:
    """``curves`` [seeds, STEPS]: the last 30 steps within 0.05 of the start, and no window above the one before it by
    two standard errors of their difference."""
    share = curves[:, -30:].mean() / curves[:, 0].mean()
    assert share <= 0.05, f"the KL of the last 30 steps is {share:.3f} of the start's"
    whole = STEPS // WINDOW * WINDOW
    windows = curves[:, :whole].reshape(len(curves), -1, WINDOW).mean(-1)
    change = np.diff(windows, axis=1)
    errors = change.std(axis=0, ddof=1) / np.sqrt(len(curves))
    rising = change.mean(0) > 2 * errors
    assert not rising.any(), f"windows {np.flatnonzero(rising) + 1} lie above those before: {windows.mean(0)}"


@pytest.mark.parametrize(
    "lag", [pytest.param(0, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough), 16]
)
@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "ppo"])
def test_a_kl_in_the_reward_keeps_the_policy_at_the_reference(name: str, lag: int) -> None:
    assert_held(np.stack([divergences(with_kl(name), lag, seed) for seed in range(SEEDS)]))
