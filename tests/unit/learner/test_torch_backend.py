"""The backend's own duties: schedules, the guard against broken gradients, the critic, and learning at all."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from asyncrlhf.data.packing import pack
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.learner.updates.updaters import schedule_factor
from asyncrlhf.types import Prompt, Rollout, TrainSample
from tests.numeric import assert_close
from tests.unit.learner.worlds import VOCABULARY, backend, llama, random_batch


def weights(trained: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in trained.parameters().items()}


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0.25]),
        (
            "cosine",
            [1 / 3, 2 / 3, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, (1 - math.sqrt(0.5)) / 2],
        ),
    ],
)
def test_learning_rate_schedule(schedule: str, factors: list[float]) -> None:
    config = LearnerConfig(lr_schedule=schedule, warmup_steps=2)
    assert_close([schedule_factor(config, step, 6) for step in range(7)], factors)


def test_learning_rate_of_the_step_is_used_and_reported() -> None:
    config = LearnerConfig(learning_rate=1e-2, lr_schedule="linear")
    trained = backend(learner=config, steps=2)
    assert_close(trained.train_step(random_batch()).metrics["learning_rate"], 1e-2)
    assert_close(trained.train_step(random_batch()).metrics["learning_rate"], 5e-3)


def test_gradient_clipping_bounds_what_the_optimizer_sees() -> None:
    trained = backend(learner=LearnerConfig(learning_rate=0.0, max_grad_norm=1e-3))
    assert trained.train_step(random_batch()).metrics["grad_norm"] > 1e-2
    norm = torch.stack([p.grad.square().sum() for p in trained.model.parameters()]).sum().sqrt()
    assert_close(float(norm), 1e-3, rtol=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted_then_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrlhf.learner.torch_backend.MOST_SKIPPED", 2)
    trained = backend(learner=LearnerConfig(learning_rate=1e-2))
    trained.train_step(random_batch())
    before, broken = weights(trained), random_batch()
    broken = dataclasses.replace(broken, weights=np.full_like(broken.weights, np.inf))
    result = trained.train_step(broken)
    assert result.skipped and result.metrics["skipped_updates"] == 1 and trained.policy_version == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.parameters().items())
    assert not trained.train_step(random_batch()).skipped
    trained.train_step(broken)
    with pytest.raises(AsyncRLHFError, match="not finite in 2 learner steps in a row"):
        trained.train_step(broken)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_critics_gradient_that_is_not_finite_moves_neither_it_nor_the_policy(
    optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = AlgorithmConfig(advantage="gae", correction="none")
    trained = backend(algorithm, LearnerConfig(learning_rate=1e-2, optim=optim, critic_learning_rate=1e-2))
    trained.train_step(random_batch())
    assert trained.updater.critic is not None
    modules = (trained.model, trained.updater.critic)
    before = [parameter.detach().clone() for module in modules for parameter in module.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr("asyncrlhf.learner.torch_backend.critic_loss", lambda *args: args[2].sum() * math.inf)
        result = trained.train_step(random_batch())
    assert result.skipped and result.metrics["skipped_updates"] == 1
    after = [parameter for module in modules for parameter in module.parameters()]
    assert all(map(torch.equal, before, after))
    assert not trained.train_step(random_batch()).skipped


@pytest.mark.parametrize("place", [0, 2], ids=["the first", "a later one"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_an_update_that_is_not_finite_leaves_no_trace_in_the_optimizer(optim: str, place: int) -> None:
    """AdamW's kernel leaves it out by itself; of Muon the host asks."""
    batches = [random_batch(seed=seed) for seed in range(4)]
    config = LearnerConfig(learning_rate=1e-2, optim=optim)
    plain, struck = backend(learner=config), backend(learner=config)
    for number, batch in enumerate(batches):
        if number == place:
            broken = dataclasses.replace(batch, weights=np.full_like(batch.weights, np.inf))
            assert struck.train_step(broken).skipped
        for trained in (plain, struck):
            trained.train_step(batch)
    assert all(torch.equal(p, struck.parameters()[name]) for name, p in plain.parameters().items())


def test_a_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a reference model"):
        backend(AlgorithmConfig(kl="loss", beta=0.1))


def test_master_weights_are_float32_and_autocast_comes_close() -> None:
    half = llama().to(torch.bfloat16)
    trained = backend(model=half)
    assert {p.dtype for p in trained.parameters().values()} == {torch.float32}
    batch = random_batch()
    exact = backend().train_step(batch).metrics
    for precision in ("bfloat16", "float16"):
        config = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, mixed_precision=precision)
        mixed = backend(learner=config).train_step(batch)
        assert not mixed.skipped
        assert_close(mixed.metrics["grad_norm"], exact["grad_norm"], rtol=0.05)
        assert_close(mixed.metrics["entropy"], exact["entropy"], rtol=0.02)


def test_gradient_checkpointing_changes_memory_only() -> None:
    batch = random_batch()
    config = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, gradient_checkpointing=True)
    plain, saved = backend().train_step(batch), backend(learner=config).train_step(batch)
    assert_close(saved.metrics, plain.metrics, rtol=1e-5, atol=1e-6)


def bandit(trained: TorchBackend, seed: int, size: int = 32) -> tuple[list[TrainSample], float]:
    """One-token responses sampled from the policy itself; the reward is 1 for the tokens below 4."""
    draws = np.random.default_rng(seed)
    prompt = np.array([VOCABULARY - 1, 5])
    logits = np.array([trained.score([np.append(prompt, token)])[0][-1] for token in range(VOCABULARY)])
    chances = np.exp(logits.astype(np.float64))
    chances /= chances.sum()
    made = []
    for index in range(size):
        token = int(draws.choice(VOCABULARY, p=chances))
        rollout = Rollout(
            rollout_id=index,
            group_id=index // 8,
            prompt=Prompt("p", "", prompt),
            response_ids=np.array([token]),
            behavior_logprobs=logits[token : token + 1].astype(np.float32),
            policy_versions=np.array([trained.policy_version]),
            finish_reason="length",
            response_text="",
            generator_id="g",
        )
        made.append(TrainSample(rollout, float(token < 4)))
    return made, float(chances[:4].sum())


def test_a_bandit_is_learned_on_policy() -> None:
    trained = backend(learner=LearnerConfig(learning_rate=1e-2))
    first = bandit(trained, 0)[1]
    for step in range(25):
        samples, chance = bandit(trained, step)
        metrics = trained.train_step(pack(samples)).metrics
        assert_close(metrics["ess_fraction"], 1.0, atol=1e-4)
        assert_close(metrics["behavior_kl"], 0.0, atol=1e-5)
    assert first < 0.6 and chance > 0.9


def test_the_critic_learns_to_predict_the_reward() -> None:
    algorithm = AlgorithmConfig(advantage="gae", value_clip=10.0)
    trained = backend(algorithm, LearnerConfig(learning_rate=0.0, critic_learning_rate=1e-2))
    policy, batch = weights(trained), random_batch(6, 3)
    batch = dataclasses.replace(batch, rewards=(batch.group_ids % 2).astype(np.float32))
    first = trained.train_step(batch).metrics
    for _ in range(40):
        last = trained.train_step(batch).metrics
    assert_close(first["explained_variance"], 0.0, atol=1e-6)
    assert last["explained_variance"] > 0.7 and last["value_loss"] < first["value_loss"] / 3
    assert all(torch.equal(policy[name], tensor) for name, tensor in trained.parameters().items())
