"""What an algorithm takes from a whole update, from token ages and from its slow network, against plain references."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.types import TrainBatch
from tests.numeric import assert_close
from tests.unit.learner.test_presets import preset, spans, stale_batch, step
from tests.unit.learner.test_step import group_norm
from tests.unit.learner.worlds import assert_same, backend, gradients, llama, needs, plain_logprobs, random_batch

MOVING = LearnerConfig(learning_rate=1e-2, max_grad_norm=0.0)


def rows(batch: TrainBatch, array: np.ndarray) -> list[torch.Tensor]:
    """[T] as one tensor of response tokens for each sequence, double precision."""
    return [torch.from_numpy(array[s:e][batch.response_mask[s:e]]).double() for s, e in spans(batch)]


def gradient_of(batch: TrainBatch, coefficients: list[torch.Tensor], thetas: list[torch.Tensor], model) -> dict:
    """-sum of coefficient times log pi over the mask, a token mean."""
    total, tokens = torch.zeros(()), int(batch.loss_mask.sum())
    for row, (coefficient, theta) in enumerate(zip(coefficients, thetas, strict=True)):
        mask = rows(batch, batch.loss_mask)[row].bool()
        total = total - float(batch.weights[row]) * (coefficient.float() * theta)[mask].sum() / tokens
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_m2po_drops_the_same_tokens_as_a_search_over_the_whole_update() -> None:
    batch, model = stale_batch(), llama()
    thetas = plain_logprobs(model, batch)
    drifts = [t.detach().double() - b for t, b in zip(thetas, rows(batch, batch.behavior_logprobs), strict=True)]
    masks = [m.bool() for m in rows(batch, batch.loss_mask)]
    advantages = group_norm(batch)
    harmful = sorted(
        (float(d) ** 2, row, t)
        for row, (drift, mask) in enumerate(zip(drifts, masks, strict=True))
        for t, d in enumerate(drift)
        if mask[t] and d * advantages[row] > 0
    )
    kept = list(harmful)
    while kept and np.mean([square for square, _, _ in kept]) > 0.04:
        kept.pop()
    dropped = {(row, t) for _, row, t in harmful[len(kept) :]}
    assert 0 < len(dropped) < len(harmful)
    coefficients = [
        torch.tensor([0.0 if (row, t) in dropped else advantages[row] * float(d.exp()) for t, d in enumerate(drift)])
        for row, drift in enumerate(drifts)
    ]
    expected = gradient_of(batch, coefficients, thetas, model)
    for budget in (10_000, 25):
        gradient, metrics = step(preset("m2po"), batch, budget)
        assert_same(gradient, expected, tolerance=5e-5)
        assert_close(metrics["clip_fraction"], len(dropped) / int(batch.loss_mask.sum()), rtol=1e-5)
        assert_close(metrics["harmful_second_moment"], np.mean([h[0] for h in harmful]), rtol=1e-3)


def test_a3po_interpolates_by_the_version_lag_of_each_token() -> None:
    batch, model = stale_batch(seed=4), llama()
    thetas = plain_logprobs(model, batch)
    lags = [(-v).clamp(min=1) for v in rows(batch, batch.policy_versions)]
    assert {lag for part in lags for lag in part.tolist()} == {1, 2, 3}
    coefficients = []
    for row, (theta, mu, lag) in enumerate(zip(thetas, rows(batch, batch.behavior_logprobs), lags, strict=True)):
        advantage, now = group_norm(batch)[row], theta.detach().double()
        proximal = mu + (lag - 1) / lag * (now - mu)
        ratio, weight = (now - proximal).exp(), (proximal - mu).exp()
        clipped = (ratio > 1.2) if advantage > 0 else (ratio < 0.8)
        coefficients.append(advantage * ratio * weight * ~clipped * (weight <= 5))
    gradient, metrics = step(preset("a3po"), batch, 25)
    assert_same(gradient, gradient_of(batch, coefficients, thetas, model), tolerance=5e-5)
    assert metrics["clip_fraction"] > 0


def test_the_rate_follows_the_sequences_effective_sample_size() -> None:
    batch = stale_batch()
    trained = backend(preset("vcpo"), dataclasses.replace(MOVING, lr_schedule="linear"), steps=4)
    trained.train_step(batch)
    batch = stale_batch(seed=3)
    model = llama()
    model.load_state_dict(trained.model.state_dict())
    moved = torch.cat(plain_logprobs(model, batch)).detach().double().numpy()
    drift = np.zeros(len(batch.token_ids))
    drift[batch.response_mask] = moved - batch.behavior_logprobs[batch.response_mask]
    products = np.array([np.exp((drift * batch.loss_mask)[s:e].sum()) for s, e in spans(batch)])
    products = products[[batch.loss_mask[s:e].any() for s, e in spans(batch)]]
    fraction = products.sum() ** 2 / (products**2).sum() / len(products)
    metrics = trained.train_step(batch).metrics
    assert_close(metrics["learning_rate"], 0.75e-2)
    assert_close(metrics["effective_learning_rate"], 0.75e-2 * fraction**0.5, rtol=1e-3)
    assert trained.updater.optimizer.param_groups[0]["lr"] == metrics["effective_learning_rate"] and fraction < 0.9
    assert_close(trained.train_step(batch).metrics["learning_rate"], 0.5e-2)


def test_the_slow_network_is_the_average_of_the_policies() -> None:
    trained = backend(preset("impact"), MOVING)
    assert trained.ema is not None
    average = {name: p.detach().double().clone() for name, p in trained.model.named_parameters()}
    for seed in range(3):
        trained.train_step(random_batch(seed=seed))
        for name, parameter in trained.model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter.detach().double()
    for name, parameter in trained.ema.model.named_parameters():
        assert_close(parameter.double(), average[name], atol=1e-6, what=name)
        assert not parameter.requires_grad
    assert trained.parameters().keys() == dict(llama().named_parameters()).keys(), "only the policy is published"


def test_impact_clips_the_ratio_with_the_samplers_part_in_it() -> None:
    """r = clamp(mu / target, 0, 2) pi / mu (RLlib's APPO), with a target that lies under half of mu on many tokens."""
    batch, model = stale_batch(), llama()
    algorithm = dataclasses.replace(preset("impact"), advantage="group_norm", epsilon=0.4, epsilon_high=0.4)
    assert needs(algorithm) == {"mu", "ema", "group"}
    trained = backend(algorithm)
    assert trained.ema is not None
    trained.ema.model.load_state_dict(llama(seed=3).state_dict())
    with torch.no_grad():
        slow = [s.double() for s in plain_logprobs(llama(seed=3), batch)]
    trained.train_step(batch)
    thetas, coefficients, capped = plain_logprobs(model, batch), [], []
    for row, (theta, target, mu) in enumerate(zip(thetas, slow, rows(batch, batch.behavior_logprobs), strict=True)):
        advantage, now = group_norm(batch)[row], theta.detach().double()
        ratio = (mu - target).exp().clamp(0, 2) * (now - mu).exp()
        clipped = (ratio > 1.4) if advantage > 0 else (ratio < 0.6)
        coefficients.append(advantage * ratio * ~clipped)
        capped += (mu > target + np.log(2)).tolist()
    assert 0.1 < np.mean(capped) < 0.9
    assert_same(gradients(trained), gradient_of(batch, coefficients, thetas, model), tolerance=5e-5)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward pass of a policy had a gradient."""
    seen: list[bool] = []
    original = PackedPolicy.forward

    def counted(self: PackedPolicy, *arguments: object) -> object:
        seen.append(torch.is_grad_enabled())
        return original(self, *arguments)

    monkeypatch.setattr(PackedPolicy, "forward", counted)
    return seen


@pytest.mark.parametrize("name", ["m2po", "sat", "vcpo", "oapl", "grpo_mu"])
def test_an_update_of_one_microbatch_needs_no_pass_of_its_own(passes: list[bool], name: str) -> None:
    step(preset(name), stale_batch())
    assert passes == [True]


def test_more_microbatches_are_looked_at_once_and_the_proximal_pass_serves_the_first_update(passes: list[bool]) -> None:
    batch = stale_batch()
    step(preset("m2po"), batch, budget=60)
    assert passes.count(False) == passes.count(True) > 1
    passes.clear()
    step(dataclasses.replace(preset("m2po"), minibatches=2), batch)
    assert passes == [False, False, True, True], "the second update is one microbatch"
    passes.clear()
    step(preset("best_of_n"), batch, budget=60)
    sequences = batch.num_sequences
    assert passes.count(False) > 0 and len(passes) < sequences, "each sequence goes through one pass"


def test_a_kl_to_the_sampler_pulls_back_to_it() -> None:
    """kl_target=mu: the k2 estimator's importance-weighted gradient is ratio times log-ratio, token by token."""
    batch, model = stale_batch(), llama()
    batch = dataclasses.replace(batch, rewards=np.zeros_like(batch.rewards))
    thetas = plain_logprobs(model, batch)
    drifts = [t.detach().double() - b for t, b in zip(thetas, rows(batch, batch.behavior_logprobs), strict=True)]
    expected = gradient_of(batch, [-0.3 * d.exp() * d for d in drifts], thetas, model)
    algorithm = AlgorithmConfig(anchor="mu", correction="none", kl="loss", beta=0.3, kl_target="mu", kl_estimator="k2")
    assert not algorithm.needs_reference
    trained = backend(algorithm)
    trained.train_step(batch)
    assert_same(gradients(trained), expected, tolerance=5e-5)


def test_the_quadratic_penalty_of_dro_is_a_kl_to_the_sampler_without_weights() -> None:
    """verl's `dro` (pull request 7245): -(A log pi - beta / 2 (log pi - log mu)^2), token by token. docs/algorithms.md
    says by which settings. OPMD's square is of a sequence's sum, and moves another way."""
    batch, model = stale_batch(), llama()
    thetas = plain_logprobs(model, batch)
    drifts = [t.detach().double() - b for t, b in zip(thetas, rows(batch, batch.behavior_logprobs), strict=True)]
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()
    (words,) = re.findall(r"`(algorithm=grpo_mu [^`]*kl_target=mu[^`]*)`", page)
    algorithm = load_config(words.split()).algorithm
    assert not algorithm.needs_reference
    loss = [group_norm(batch)[row] - algorithm.beta * drift for row, drift in enumerate(drifts)]
    trained = backend(algorithm)
    trained.train_step(batch)
    expected = gradient_of(batch, loss, thetas, model)
    assert_same(gradients(trained), expected, tolerance=5e-5)
    of_sequences = [group_norm(batch)[row] - algorithm.beta * drift.sum() for row, drift in enumerate(drifts)]
    other = gradient_of(batch, of_sequences, plain_logprobs(again := llama(), batch), again)
    assert max(float((other[name] - expected[name]).abs().max()) for name in expected) > 1e-4
