"""A KL in the reward holds the policy at the reference: nothing but the KL is rewarded, at several lags and seeds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.unit.learner.bandit import Table, policy, sampled

pytestmark = pytest.mark.more

STEPS, WINDOW, SEEDS, SPREAD = 150, 20, 5, 0.1
RATE = 3e-3
LAGS = [pytest.param(0, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough), 16]
NAMES = ["rloo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("reinforce_pp", "ppo"))]


def with_kl(name: str) -> AlgorithmConfig:
    return dataclasses.replace(load_config([f"algorithm={name}"]).algorithm, kl="reward", beta=1.0)


def divergences(
    algorithm: AlgorithmConfig, lag: int, seed: int, rate: float = RATE, schedule: str = "linear"
) -> np.ndarray:
    """KL to the reference in nats before each step, every task reward 0 and every batch ``lag`` steps old: [STEPS]."""
    reference, shadow = policy(100 + seed, SPREAD), policy(seed, SPREAD)
    with torch.no_grad():
        goal = Table.of(reference)
    rates = LearnerConfig(learning_rate=rate, critic_learning_rate=10 * rate, lr_schedule=schedule)
    spec = BackendSpec(learner=rates, algorithm=algorithm, steps=STEPS)
    trained = TorchBackend(policy(seed, SPREAD), spec, reference=reference)
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


@pytest.mark.in_turn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kl_in_the_reward_keeps_the_policy_at_the_reference(name: str, lag: int) -> None:
    assert_held(np.stack([divergences(with_kl(name), lag, seed) for seed in range(SEEDS)]))


def fisher_trace(seed: int) -> float:
    """E |gradient of log pi(y)|^2 at the reference, over its own answers y."""
    model = policy(100 + seed, SPREAD)
    answers = Table.of(model).tokens().sum(1)
    total = 0.0
    for answer in answers:
        gradient = torch.autograd.grad(answer, list(model.parameters()), retain_graph=True)
        total += float(answer.detach().exp() * sum(g.square().sum() for g in gradient))
    return total


@pytest.mark.timeout(900)
@pytest.mark.thorough
@pytest.mark.parametrize("lag", LAGS)
def test_normalised_advantages_come_under_the_floor_of_their_step_size(lag: int) -> None:
    """Advantages over their standard deviation do not shrink with the KL, so that steps of one size go on at the goal.

    Adam moves a parameter by about the rate in a step. A direction given by chance lasts for 1 / (1 - beta1) steps, and
    samples that are ``lag`` steps old push on for as many more. A displacement d of every parameter, each to a side of
    its own, is a KL of d^2 / 2 times the trace of the Fisher information.
    """
    rate, beta1 = 1e-3, LearnerConfig().adam_beta1
    seeds = range(3)
    curves = [divergences(with_kl("decoupled_grpo"), lag, seed, rate, "constant") for seed in seeds]
    displacement = rate * (1 / (1 - beta1) + lag)
    floor = 0.5 * displacement**2 * np.mean([fisher_trace(seed) for seed in seeds])
    found, start = np.mean([curve[-30:].mean() for curve in curves]), np.mean([curve[0] for curve in curves])
    assert floor < 0.2 * start, "the floor says something"
    assert found <= floor, f"a KL of {found:.2g} at the end, {start:.2g} at the start, over the floor of {floor:.2g}"
