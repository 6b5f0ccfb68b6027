"""FlashREINFORCE through the backend: its batch's mean, its gate and its weights, with one rollout for each prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrlhf.algorithms.masked import moments
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.plan import plan_step
from asyncrlhf.learner.step.targets import set_targets
from asyncrlhf.types import TrainBatch
from tests import reference
from tests.numeric import assert_close
from tests.unit.learner.test_presets import model_logprobs, preset, spans, stale_batch, step
from tests.unit.learner.worlds import assert_same, backend, llama, plain_logprobs, random_batch, share

FLASH = preset("flash_reinforce")


def alone(batch: TrainBatch) -> TrainBatch:
    """Each rollout the only one of its prompt."""
    return replace(batch, group_ids=np.arange(batch.num_sequences))


def masks(batch: TrainBatch) -> list[torch.Tensor]:
    return [torch.from_numpy(batch.loss_mask[s:e][batch.response_mask[s:e]]) for s, e in spans(batch)]


def parts(batch: TrainBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(policy, sampler) log-probs of each sequence's trained tokens; the first with gradient."""
    given = zip(plain_logprobs(MODEL, batch), spans(batch), masks(batch), strict=True)
    mu = torch.from_numpy(batch.behavior_logprobs)
    return [(x[mask], mu[s:e][torch.from_numpy(batch.response_mask[s:e])][mask]) for x, (s, e), mask in given]


MODEL = llama()


def paper(batch: TrainBatch) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """The gradient as the paper's notes write it, by a padded pass and without the kernel; which sequences stayed."""
    total, rewards, kept = torch.zeros(()), batch.rewards.astype(np.float64), []
    trained = [(i, *pair) for i, pair in enumerate(parts(batch)) if len(pair[0])]
    for i, theta, mu in trained:
        (keep,) = reference.binary_kl_keep([theta.detach().double().numpy()], [mu.double().numpy()], 0.005)
        kept.append(bool(keep[0]))
        if kept[-1]:
            advantage = float(rewards[i] - rewards.mean())
            weight = float(batch.weights[i])
            total = total - weight * advantage * ((theta.detach() - mu).exp() * theta).mean() / len(trained)
    MODEL.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in MODEL.named_parameters()}, kept


def with_a_large_ratio(batch: TrainBatch) -> TrainBatch:
    """The policy's least likely token of a sequence that stays is 30 times less likely to the sampler."""
    behavior = batch.behavior_logprobs.copy()
    theta = model_logprobs(batch)
    kept = np.flatnonzero([len(mu) > 0 and torch.allclose(x, mu, atol=0.05) for x, mu in parts(batch)])
    of = np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens))[batch.response_mask]
    usable = np.isin(of, kept) & batch.loss_mask[batch.response_mask]
    rarest = np.flatnonzero(usable)[theta[usable].argmin()]
    behavior[np.flatnonzero(batch.response_mask)[rarest]] = theta[rarest] - np.log(30.0)
    return replace(batch, behavior_logprobs=behavior)


@pytest.mark.parametrize("budget", [10_000, 25, 1])
def test_the_preset_is_the_paper_with_one_rollout_a_prompt(budget: int) -> None:
    """Uneven lengths, gaps in the mask, sequences that stay and that go, neighbours in one pass or each alone, and a
    token with a ratio of 30: above AIPO's cap, below ratio_bound."""
    batch = with_a_large_ratio(alone(stale_batch(groups=7)))
    expected, kept = paper(batch)
    assert 3 <= sum(kept) <= len(kept) - 3
    gradient, metrics = step(FLASH, batch, budget)
    assert_same(gradient, expected, tolerance=5e-5)
    lengths = np.array([len(mu) for _, mu in parts(batch) if len(mu)])
    assert_close(metrics["clip_fraction"], lengths[~np.array(kept)].sum() / lengths.sum())


def test_groups_do_not_matter() -> None:
    batch = stale_batch()
    assert_same(step(FLASH, alone(batch))[0], step(FLASH, batch)[0])


def test_a_rollout_without_a_trained_token_counts_in_the_mean() -> None:
    batch = alone(stale_batch())
    start, end = spans(batch)[0]
    batch.loss_mask[start:end] = False
    batch.rewards[0] = 50.0
    gradient, metrics = step(FLASH, batch)
    assert_same(gradient, paper(batch)[0], tolerance=5e-5)
    assert metrics["negative_advantage_fraction"] == 1.0


def test_the_mean_is_that_of_all_ranks() -> None:
    """What the ranks exchange is the count and the sums of their rewards."""
    batch = alone(stale_batch(groups=3))
    ranks = [plan_step(share(batch, rank, 2), FLASH, 10_000, torch.device("cpu")).host for rank in range(2)]
    totals = sum(moments(rank.rewards, torch.ones(len(rank.rewards), dtype=torch.bool)) for rank in ranks)
    for rank in ranks:
        set_targets(rank, FLASH, lambda mine: totals)
        assert_close(rank.advantages, (rank.rewards - batch.rewards.mean())[rank.sequence_ids], atol=1e-6)


def test_fresh_samples_give_reinforce_with_the_mean_of_the_batch() -> None:
    batch = alone(random_batch(4, 3, seed=8))
    batch.behavior_logprobs[batch.response_mask] = model_logprobs(batch)
    plain = AlgorithmConfig(advantage="batch_mean", anchor="self", coef="one", correction="none", aggregate="seq_mean")
    (gradient, metrics), (expected, _) = step(FLASH, batch), step(plain, batch)
    assert metrics["clip_fraction"] == 0.0
    assert_same(gradient, expected)


@pytest.mark.parametrize("name", ["flash_reinforce", "opsm"])
def test_a_batch_of_nothing_but_dropped_sequences_trains_nothing(name: str) -> None:
    """No NaN, no skipped update: a gradient of zero, and all that the gate looks at is clipped."""
    batch = alone(random_batch(4, 3, seed=8)) if name == "flash_reinforce" else random_batch(4, 3, seed=8)
    batch.behavior_logprobs[batch.response_mask] = model_logprobs(batch) + 3.0
    trained = backend(preset(name), max_completion_length=9)
    before = {key: tensor.clone() for key, tensor in trained.parameters().items()}
    result = trained.train_step(batch)
    clipped = "clip_fraction" if name == "flash_reinforce" else "clip_fraction_negative"
    assert result.metrics[clipped] == 1.0 and not result.skipped and np.isfinite(list(result.metrics.values())).all()
    if name == "flash_reinforce":
        assert result.metrics["grad_norm"] == result.metrics["loss"] == 0.0
        assert all(torch.equal(before[key], tensor) for key, tensor in trained.parameters().items())


@pytest.mark.parametrize("reward", [0.1, 1.0 / 3.0, -7.7])
def test_equal_rewards_have_no_signal_at_all(reward: float) -> None:
    """Exactly none: an optimizer that divides by the gradient's size would make a step of a rounding error."""
    batch = alone(stale_batch())
    batch.rewards[:] = reward
    assert step(FLASH, batch, 25)[1]["grad_norm"] == 0.0
