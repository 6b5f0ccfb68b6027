"""What must hold for every preset in conf/algorithm, through the backend and a tiny random model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import conf_folder
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.step.without_gradient import zero_gradient_sequences
from asyncrlhf.types import FloatArray, TrainBatch
from tests.numeric import assert_close
from tests.unit.learner.worlds import assert_same, backend, gradients, llama, plain_logprobs, random_batch

PRESETS = sorted(path.stem for path in (conf_folder() / "algorithm").glob("*.yaml"))
LONGEST = 9


@cache
def preset(name: str) -> AlgorithmConfig:
    return load_config([f"algorithm={name}"]).algorithm


def one_update(name: str) -> AlgorithmConfig:
    return dataclasses.replace(preset(name), minibatches=1, num_iterations=1)


def stale_batch(groups: int = 5, seed: int = 2, flat_groups: int = 0) -> TrainBatch:
    """Tokens 0 to 3 versions old at the learner's version 0, sampled by a policy near the model of the tests; every
    third sequence by one that is very near."""
    batch = random_batch(groups, 3, seed=seed, flat_groups=flat_groups)
    versions = np.where(batch.response_mask, batch.policy_versions - 3, -1)
    behavior = batch.behavior_logprobs.copy()
    noise = np.random.default_rng(seed).normal(0, 0.3, len(behavior))
    near = np.repeat(np.arange(batch.num_sequences) % 3 == 0, np.diff(batch.cu_seqlens))
    noise = np.where(near, 0.01 * noise, noise)
    behavior[batch.response_mask] = model_logprobs(batch) + noise[batch.response_mask]
    return dataclasses.replace(batch, policy_versions=versions, behavior_logprobs=behavior)


def model_logprobs(batch: TrainBatch) -> FloatArray:
    with torch.no_grad():
        return torch.cat(plain_logprobs(llama(), batch)).numpy()


def step(algorithm: AlgorithmConfig, batch: TrainBatch, budget: int = 10_000, reference: int = 5, **options: object):
    learner = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0, token_budget=budget)
    reference_model = llama(seed=reference) if algorithm.needs_reference else None
    trained = backend(algorithm, learner, reference=reference_model, max_completion_length=LONGEST, **options)
    metrics = trained.train_step(batch).metrics
    return gradients(trained), metrics


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
@pytest.mark.thorough_but(every=2)
def test_microbatches_do_not_change_gradient_or_metrics(name: str) -> None:
    """Nor, with a microbatch for each sequence, where the siblings of a group lie."""
    batch = stale_batch(flat_groups=1)
    (gradient, metrics), *others = (step(preset(name), batch, budget) for budget in (10_000, 25, 1))
    for other_gradient, other_metrics in others:
        assert_same(other_gradient, gradient, tolerance=3e-5)
        assert_close(other_metrics, metrics, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
def test_what_lies_outside_the_mask_never_matters(name: str) -> None:
    batch = stale_batch()
    broken = dataclasses.replace(batch, behavior_logprobs=np.where(batch.loss_mask, batch.behavior_logprobs, np.nan))
    (gradient, metrics), (other, other_metrics) = step(preset(name), batch), step(preset(name), broken)
    assert_same(other, gradient)
    assert_close(other_metrics, metrics, rtol=1e-5, atol=1e-6)


def with_broken_tokens(batch: TrainBatch) -> tuple[TrainBatch, TrainBatch]:
    """The batch with a NaN, a -inf and an inf for behavior log-probs of tokens that train, one token being the whole of
    its sequence's mask; and the batch with these tokens masked."""
    draws, behavior, mask = np.random.default_rng(0), batch.behavior_logprobs.copy(), batch.loss_mask.copy()
    alone = next(s + np.flatnonzero(mask[s:e]) for s, e in spans(batch) if mask[s:e].sum() == 1)
    chosen = np.concatenate([draws.choice(np.setdiff1d(np.flatnonzero(mask), alone), 3, replace=False), alone])
    behavior[chosen], mask[chosen] = [np.nan, -np.inf, np.inf, np.nan], False
    return dataclasses.replace(batch, behavior_logprobs=behavior), dataclasses.replace(batch, loss_mask=mask)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
def test_a_token_without_a_behavior_logprob_is_no_evidence(name: str) -> None:
    broken, masked = with_broken_tokens(stale_batch())
    assert np.isfinite(masked.behavior_logprobs).all() and masked.loss_mask.sum() == broken.loss_mask.sum() - 4
    (gradient, metrics), (other, other_metrics) = step(preset(name), broken, 25), step(preset(name), masked, 25)
    assert_same(gradient, other, tolerance=1e-6)
    assert (metrics.pop("invalid_behavior_tokens"), other_metrics.pop("invalid_behavior_tokens")) == (4, 0)
    assert metrics == pytest.approx(other_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["decoupled_grpo", "rloo", "grpo_mu", "vcpo", "online_dpo", "impact"])
def test_a_token_without_a_behavior_logprob_does_not_stop_the_update(name: str) -> None:
    broken, _ = with_broken_tokens(stale_batch())
    trained = backend(one_update(name), LearnerConfig(learning_rate=1e-2), reference=llama(seed=5))
    before = {key: tensor.clone() for key, tensor in trained.parameters().items()}
    assert not trained.train_step(broken).skipped
    assert any(not torch.equal(before[key], tensor) for key, tensor in trained.parameters().items())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trained.parameters().values())


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
def test_a_token_with_a_log_ratio_of_100_is_not_the_whole_step(name: str) -> None:
    """Its sequence's part of the gradient, against that part on policy: a factor of some hundreds, not of e^20."""
    batch = random_batch(4, 3, seed=8)
    behavior, weights = batch.behavior_logprobs.copy(), batch.weights.copy()
    behavior[batch.response_mask] = model_logprobs(batch)
    members = np.flatnonzero(batch.group_ids == 1)
    worst = min((i for i in members if batch.loss_mask[slice(*spans(batch)[i])].any()), key=lambda i: batch.rewards[i])
    assert batch.rewards[worst] < 0
    far = behavior.copy()
    far[spans(batch)[worst][0] + np.flatnonzero(batch.loss_mask[slice(*spans(batch)[worst])])[0]] -= 100.0
    weights[worst] = 0.0
    without, near, outlier = (
        step(one_update(name), dataclasses.replace(batch, behavior_logprobs=mu, weights=w), reference=0)[0]
        for mu, w in ((behavior, weights), (behavior, batch.weights), (far, batch.weights))
    )
    assert distance(outlier, without) <= 500 * distance(near, without)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(a[key] - b[key]).square().sum() for key in b]).sum().sqrt())


def has_advantage_without_spread(algorithm: AlgorithmConfig) -> bool:
    return algorithm.head == "regress" or algorithm.advantage_shift != 0 or algorithm.kl == "loss"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
def test_rewards_that_say_nothing_give_no_gradient(name: str) -> None:
    """Rewards of zero throughout: flat groups, zero returns, and a critic that starts at zero."""
    batch = dataclasses.replace(stale_batch(), rewards=np.zeros(15, dtype=np.float32))
    gradient, metrics = step(preset(name), batch)
    largest = max(float(tensor.abs().max()) for tensor in gradient.values())
    if has_advantage_without_spread(preset(name)):
        assert largest > 1e-4 and not zero_gradient_sequences(batch, preset(name)).any()
    else:
        assert largest == 0.0 and metrics["grad_norm"] == 0.0


def test_only_who_makes_a_pair_is_trained_on() -> None:
    rewards = np.array([0.1, 0.9, 0.5, 0.3, 0.3, 0.3, 0.9, 0.9, 0.2], dtype=np.float32)
    batch = dataclasses.replace(random_batch(3, 3), rewards=rewards)
    assert zero_gradient_sequences(batch, preset("online_dpo")).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert zero_gradient_sequences(batch, preset("best_of_n")).tolist() == [1, 0, 1, 1, 1, 1, 0, 0, 1]
    assert not zero_gradient_sequences(batch, preset("tba")).any()


# --- on-policy: every preset is the plain policy gradient of its advantage -----------------------------------------

Advantage = Callable[[TrainBatch, AlgorithmConfig, list[np.ndarray]], np.ndarray]


def by_group(value: Callable[[np.ndarray], np.ndarray]) -> Advantage:
    """A rule on one group's rewards [G]."""

    def advantages(batch: TrainBatch, algorithm: AlgorithmConfig, norms: list[np.ndarray]) -> np.ndarray:
        found = np.zeros(batch.num_sequences)
        for group in np.unique(batch.group_ids):
            where = batch.group_ids == group
            found[where] = value(batch.rewards[where].astype(np.float64))
        return found

    return advantages


def vstar(beta: float) -> Advantage:
    return by_group(lambda r: r - beta * np.log(np.mean(np.exp(r / beta))))


def least_variance(batch: TrainBatch, algorithm: AlgorithmConfig, norms: list[np.ndarray]) -> np.ndarray:
    found, squares = np.zeros(batch.num_sequences), np.array([n.sum() for n in norms])
    for group in np.unique(batch.group_ids):
        where = batch.group_ids == group
        rewards = batch.rewards[where].astype(np.float64)
        found[where] = rewards - (squares[where] * rewards).sum() / squares[where].sum()
    return found


def ends(r: np.ndarray) -> np.ndarray:
    """1 for the best, -1 for the worst."""
    return (np.arange(len(r)) == r.argmax()).astype(float) - (np.arange(len(r)) == r.argmin())


def advantage_rule(a: AlgorithmConfig) -> Advantage:
    if a.head == "regress":
        return vstar(a.vstar_beta) if a.regress_target == "vstar" else by_group(lambda r: r - r.mean())
    if a.head == "pair":
        # -log sigmoid(beta gap) and (gap - 1/(2 beta))^2 at gap 0, and -log pi(best).
        slope = {"dpo": a.beta / 2, "ipo": 1 / (a.beta or 1), "best": 1.0}[a.pair_loss]
        return by_group(lambda r: slope * (np.maximum(ends(r), 0) if a.pair_loss == "best" else ends(r)))
    return {
        "none": by_group(lambda r: 0 * r),
        "group_norm": by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4)),
        "group_mean": by_group(lambda r: r - (r.mean() + a.advantage_shift)),
        "loo": by_group(lambda r: r - (r.sum() - r) / (len(r) - 1)),
        "mean_norm": by_group(lambda r: r / r.mean() - 1 if r.mean() > 0 else 0 * r),
        "batch_mean": lambda batch, algorithm, norms: batch.rewards - batch.rewards.mean(dtype=np.float64),
        "opob": least_variance,
    }.get(a.advantage, lambda batch, algorithm, norms: batch.rewards.astype(np.float64))


def teacher_of(a: AlgorithmConfig) -> int:
    """The seed of the reference model: the policy's own, but for distillation, which has no gradient there."""
    return 5 if a.kl == "loss" else 0


def expected_gradient(batch: TrainBatch, a: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Of -sum w A log pi under the preset's aggregate, by a padded forward; values are zero. The KL to a teacher
    adds its weight, ref / pi at most ratio_bound, to each token's A."""
    model = llama()
    masks = [torch.from_numpy(batch.loss_mask[s:e][batch.response_mask[s:e]]) for s, e in spans(batch)]
    logprobs = plain_logprobs(model, batch)
    counts = [int(mask.sum()) for mask in masks]
    present = sum(count > 0 for count in counts)
    advantages = advantage_rule(a)(batch, a, score_terms(batch, masks))
    if a.whiten or a.advantage == "whiten":
        spread = np.repeat(advantages, counts)
        advantages = (advantages - spread.mean()) / np.sqrt(spread.var(ddof=1) + 1e-8)
    with torch.no_grad():
        refs = plain_logprobs(llama(seed=teacher_of(a)), batch)
    total = torch.zeros(())
    for row, (theta, mask) in enumerate(zip(logprobs, masks, strict=True)):
        weight = (refs[row] - theta.detach())[mask].exp().clamp(max=a.largest_ratio)
        gain = advantages[row] + a.beta * (a.kl == "loss") * weight
        share = {"token": 1 / sum(counts), "seq_mean": 1 / max(counts[row], 1) / present, "seq_sum": 1 / present}
        scale = share.get(a.aggregate, 1 / (present * LONGEST)) * float(batch.weights[row])
        total = total - scale * (gain * theta[mask]).sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def spans(batch: TrainBatch) -> list[tuple[int, int]]:
    return list(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))


def score_terms(batch: TrainBatch, masks: list[torch.Tensor]) -> list[np.ndarray]:
    """|onehot - pi|^2 of each masked token, sequence by sequence, written out over the vocabulary."""
    found, model = [], llama()
    for (start, stop), mask in zip(spans(batch), masks, strict=True):
        ids = torch.from_numpy(batch.token_ids[start:stop])
        with torch.no_grad():
            pi = model(input_ids=ids[None]).logits[0, :-1].double().softmax(-1)
        scores = torch.nn.functional.one_hot(ids[1:], pi.shape[-1]) - pi
        answered = torch.from_numpy(batch.response_mask[start + 1 : stop])
        found.append(scores.square().sum(-1)[answered][mask].numpy())
    return found


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but(every=6)
def test_on_policy_the_gradient_is_minus_a_grad_log_pi(name: str) -> None:
    """mu = theta, and the reference too unless it teaches: every ratio is 1, whatever is done with it. The heads'
    factors are their documented ones."""
    batch, algorithm = random_batch(4, 3, seed=8), one_update(name)
    behavior = batch.behavior_logprobs.copy()
    behavior[batch.response_mask] = model_logprobs(batch)
    batch = dataclasses.replace(batch, behavior_logprobs=behavior)
    gradient, metrics = step(algorithm, batch, budget=30, reference=teacher_of(algorithm))
    assert_same(gradient, expected_gradient(batch, algorithm), tolerance=2e-4 if algorithm.level != "token" else 5e-5)
    assert_close(metrics["ess_fraction_seq"], 1.0, atol=1e-4)
    assert metrics["clip_fraction"] == 0.0 or algorithm.coef == "signed", "TOPR's bound is at 1 itself"
