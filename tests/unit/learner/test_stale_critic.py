"""What PPO's critic learns from stale samples: the value of the present policy, not of the one that sampled."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.unit.learner.bandit import ANSWERS, PROMPT, Table, V, copied, course, enumerated

pytestmark = pytest.mark.more

STEPS = 100
REWARDS = np.random.default_rng(0).uniform(0.5, 1.5, V * V)


@cache
def policies() -> tuple[list[Table], LlamaForCausalLM]:
    return course(16, rate=5e-3)


def values_under(table: Table) -> torch.Tensor:
    """The exact value of each state: before the first token, and behind each of it: [1 + V]."""
    behind = (table.second.exp() * torch.from_numpy(REWARDS).view(V, V)).sum(1)
    return torch.cat(((table.first.exp() * behind).sum()[None], behind))


def learned_values(algorithm: AlgorithmConfig, lag: int) -> torch.Tensor:
    """What the critic says of each state [1 + V] after steps on every answer of the policy ``lag`` steps ago, each
    weighted by its chance there; the policy stands still."""
    tables, now = policies()
    rates = LearnerConfig(learning_rate=0.0, critic_learning_rate=1e-2, lr_schedule="linear", max_grad_norm=0.0)
    trained = TorchBackend(copied(now), BackendSpec(learner=rates, algorithm=algorithm, steps=STEPS))
    batch = enumerated(tables[-1 - lag], REWARDS)
    for _ in range(STEPS):
        trained.train_step(batch)
    assert trained.critic is not None
    trunk, head = trained.critic.trunk, trained.critic.head
    plain = copied(now).base_model
    plain.load_state_dict(trunk.state_dict())
    ids = torch.from_numpy(np.array([[*PROMPT.token_ids, token] for token in ANSWERS[::V, 0]]))
    with torch.no_grad():
        found = head(plain(input_ids=ids).last_hidden_state).squeeze(-1)
    return torch.cat((found[:1, -2], found[:, -1])).double()


def worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found - exact) / exact).abs().max())


@pytest.mark.in_turn
@pytest.mark.parametrize("lag", [pytest.param(4, marks=pytest.mark.thorough), 16])
def test_ppo_learns_the_value_of_the_present_policy_from_stale_samples(lag: int) -> None:
    """Its default corrects the critic's targets. Without the correction they are those of the sampler."""
    tables, _ = policies()
    present, sampler = values_under(tables[-1]), values_under(tables[-1 - lag])
    assert worst(sampler, present) > 0.02, "the two policies differ enough to be told apart"
    ppo = load_config(["algorithm=ppo"]).algorithm
    assert worst(learned_values(ppo, lag), present) < 0.01
    published = dataclasses.replace(ppo, correction="none")
    uncorrected = learned_values(published, lag)
    assert worst(uncorrected, present) > 0.01
    assert worst(uncorrected, sampler) < 0.01
