"""Gradients, advantages, KL estimates and corrections against verl's core algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncrlhf.algorithms.advantages import SEQUENCE_ADVANTAGES, gae, opob, score_norms, terminal_rewards
from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.algorithms.coefficients import COEFFICIENTS
from asyncrlhf.algorithms.kl import kl_estimate
from asyncrlhf.algorithms.losses import value_loss
from asyncrlhf.algorithms.masked import whiten
from asyncrlhf.algorithms.weights import behavior_weight
from tests.references.isolated import Peers, named, require
from tests.references.layout import assert_equal, batches, our_gradient, packed, padded, per_token, tables
from tests.unit.algorithms.batches import gradient

pytestmark = pytest.mark.more

LENGTH = 16  # Dr. GRPO's constant

# verl's vanilla loss always has a dual clip, at 3 unless set; it takes part in every case below.
CLIP = COEFFICIENTS["clip"](0.2, 0.28, 1.5)
VERL_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}

# Case: (verl's name, its settings, our rule, our other switches).
LOSSES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "vanilla_token_mean": ("vanilla", VERL_CLIP, CLIP, {}),
    "vanilla_seq_mean_token_mean": (
        "vanilla",
        {"loss_agg_mode": "seq-mean-token-mean", **VERL_CLIP},
        CLIP,
        {"aggregate": "seq_mean"},
    ),
    "vanilla_seq_mean_token_sum": (
        "vanilla",
        {"loss_agg_mode": "seq-mean-token-sum", **VERL_CLIP},
        CLIP,
        {"aggregate": "seq_sum"},
    ),
    "vanilla_seq_mean_token_sum_norm": (
        "vanilla",
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": LENGTH, **VERL_CLIP},
        CLIP,
        {"aggregate": "const", "constant_length": LENGTH},
    ),
    "gspo": (
        "gspo",
        {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.05, "clip_ratio_high": 0.06},
        COEFFICIENTS["clip"](0.05, 0.06),
        {"level": "geo", "aggregate": "seq_mean"},
    ),
    # verl's bounds are 1 - low and 1 + high; ours are on the ratio itself.
    "cispo": ("cispo", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.2}, COEFFICIENTS["cap"](0.7, 1.2), {}),
    "sapo": (
        "sapo",
        {"tau_pos": 1.0, "tau_neg": 1.4},
        COEFFICIENTS["soft"](1.0, 1.4),
        {"aggregate": "seq_mean"},
    ),
    "dppo_tv": (
        "dppo_tv",
        {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02, "clip_ratio_c": 1.4},
        COEFFICIENTS["dprob"](0.03, 0.02, 1.4),
        {},
    ),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    require("verl")


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: named("verl", case))
def test_gradient_of_the_policy_loss(ask: Peers, case: str) -> None:
    name, settings, rule, switches = LOSSES[case]
    for batch in batches():
        advantages = padded(batch, batch.token_advantages)
        theirs = ask("verl", "gradient", name=name, **tables(batch), advantages=advantages, **settings)
        assert_equal(our_gradient(batch, rule, advantages=batch.token_advantages, **switches), theirs)


@pytest.mark.parametrize("case", ["geo_mean"], ids=lambda case: named("verl", case))
def test_gradient_of_gmpo(ask: Peers, case: str) -> None:
    """By itself, because its advantages are a sequence's."""
    for batch in batches():
        advantages = per_token(batch, batch.rewards)
        theirs = ask(
            "verl",
            "gradient",
            name=case,
            **tables(batch),
            advantages=padded(batch, advantages),
            clip_ratio_low=0.3,
            clip_ratio_high=0.4,
        )
        rule = COEFFICIENTS["geoclip"](0.3, 0.4)
        assert_equal(our_gradient(batch, rule, advantages=advantages, aggregate="seq_mean"), theirs)


# verl's (level, threshold): ours. Two bounds are IcePop's.
CORRECTIONS = {
    ("token", "1.2"): {"level": "token", "mode": "truncate", "high": 1.2},
    ("token", "0.8_1.3"): {"level": "token", "mode": "mask", "low": 0.8, "high": 1.3},
    ("sequence", "1.2"): {"level": "prod", "mode": "truncate", "high": 1.2},
    ("sequence", "0.5_1.5"): {"level": "prod", "mode": "mask", "low": 0.5, "high": 1.5},
}


@pytest.mark.parametrize("case", CORRECTIONS, ids=lambda case: named("verl", f"rollout_is_{'_'.join(case)}"))
def test_weights_and_gradient_under_a_correction(ask: Peers, case: tuple[str, str]) -> None:
    level, threshold = case
    cut = 0.0
    for batch in batches():
        log_ratio = padded(batch, batch.prox) - padded(batch, batch.mu)
        weights = ask(
            "verl", "correction", log_ratio=log_ratio, mask=tables(batch)["mask"], level=level, threshold=threshold
        )
        ours, counts = behavior_weight(packed(batch.prox), packed(batch.mu), *batch.tensors(), **CORRECTIONS[case])
        assert_equal(padded(batch, ours.numpy()), weights)
        cut += float(counts["behavior_truncated_fraction"] + counts["behavior_masked_fraction"])
        theirs = ask(
            "verl",
            "gradient",
            name="vanilla",
            **tables(batch),
            advantages=padded(batch, batch.token_advantages),
            weights=weights,
            **VERL_CLIP,
        )
        assert_equal(our_gradient(batch, CLIP, advantages=batch.token_advantages, weight=ours), theirs)
    assert cut > 0


AGGREGATES = {"token-mean": "token", "seq-mean-token-mean": "seq_mean", "seq-mean-token-sum": "seq_sum"}


@pytest.mark.parametrize("how", AGGREGATES, ids=lambda how: named("verl", f"value_loss_{how}"))
def test_gradient_of_the_value_loss(ask: Peers, how: str) -> None:
    for batch in batches():
        mask, ids = batch.tensors()
        theirs = ask(
            "verl",
            "value_gradient",
            values=padded(batch, batch.theta),
            old_values=padded(batch, batch.prox),
            returns=padded(batch, batch.values),
            mask=tables(batch)["mask"],
            clip=0.3,
            how=how,
        )
        leaf = packed(batch.theta).requires_grad_()
        aggregate = AGGREGATES[how]
        loss = value_loss(
            leaf,
            packed(batch.prox),
            packed(batch.values),
            mask,
            ids,
            clip=0.3,
            normaliser=normaliser_count(aggregate, mask, ids),
            aggregate=aggregate,
        )
        assert_equal(padded(batch, gradient(loss, leaf)), theirs)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"], ids=lambda estimator: named("verl", f"kl_{estimator}"))
def test_kl_estimate_and_its_gradient(ask: Peers, estimator: str) -> None:
    for batch in batches():
        mask, _ = batch.tensors()
        inside = tables(batch)["mask"]
        values, slopes = ask(
            "verl", "kl", theta=padded(batch, batch.theta), ref=padded(batch, batch.ref), estimator=estimator
        )
        leaf = packed(batch.theta).requires_grad_()
        estimates = kl_estimate(leaf, packed(batch.ref), mask, estimator=estimator)
        assert_equal(padded(batch, estimates.detach().numpy()), values * inside)
        assert_equal(padded(batch, gradient(estimates.sum(), leaf)), slopes * inside)


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)], ids=[named("verl", "gae_1_1"), named("verl", "gae_.9_.8")]
)
def test_gae(ask: Peers, gamma: float, lam: float) -> None:
    for batch in batches():
        mask, ids = batch.tensors()
        inside = tables(batch)["mask"]
        whitened, returns = ask(
            "verl",
            "gae",
            rewards=padded(batch, batch.token_advantages),
            values=padded(batch, batch.values),
            mask=inside,
            gamma=gamma,
            lam=lam,
        )
        advantages, targets = gae(packed(batch.token_advantages), packed(batch.values), mask, ids, gamma=gamma, lam=lam)
        assert_equal(padded(batch, targets.numpy()), returns * inside)
        # verl whitens inside its GAE, and a batch of one token has no spread.
        if mask.sum() > 1:
            assert_equal(padded(batch, whiten(advantages, mask).numpy()), whitened * inside)


@pytest.mark.parametrize("gamma", [1.0, 0.9], ids=lambda gamma: named("verl", f"reinforce_plus_plus_{gamma}"))
def test_reinforce_plus_plus_advantages(ask: Peers, gamma: float) -> None:
    """GAE without a critic and with lambda 1 is the discounted return."""
    for batch in batches():
        mask, ids = batch.tensors()
        if mask.sum() < 2:
            continue
        rewards = terminal_rewards(packed(batch.rewards), mask, ids)
        theirs = ask(
            "verl",
            "reinforce_plus_plus",
            rewards=padded(batch, rewards.numpy()),
            mask=tables(batch)["mask"],
            gamma=gamma,
        )
        returns, _ = gae(rewards, torch.zeros_like(rewards), mask, ids, gamma=gamma)
        assert_equal(padded(batch, whiten(returns, mask).numpy()), theirs)


# Ours: (verl's, its settings, our settings). verl's epsilon is 1e-6 unless given.
ADVANTAGES = {
    "group_norm": ("grpo", {}, {"eps": 1e-6}),
    "group_mean": ("grpo", {"norm_adv_by_std_in_grpo": False}, {}),
    "loo": ("rloo", {}, {}),
}


@pytest.mark.parametrize("ours", ADVANTAGES, ids=lambda ours: named("verl", ours))
def test_outcome_advantages(ask: Peers, ours: str) -> None:
    name, settings, our_settings = ADVANTAGES[ours]
    # Ragged groups in no order, without a group of one: there verl takes the reward itself, and we 0 or refuse.
    groups = np.array([2, 0, 1, 0, 2, 1, 1, 0, 2, 1, 3, 3])
    for seed in range(4):
        rewards = np.random.default_rng(seed).standard_normal(len(groups))
        theirs = ask("verl", "outcome_advantages", name=name, rewards=rewards, groups=groups, **settings)
        found = SEQUENCE_ADVANTAGES[ours](packed(rewards), packed(groups), **our_settings)
        assert_equal(found.numpy(), theirs)


@pytest.mark.parametrize("case", ["opob"], ids=lambda case: named("verl", f"{case}_last_token_of_otb"))
def test_least_variance_baseline(ask: Peers, case: str) -> None:
    """verl's baseline of a token sums the norms up to it; at the last token of equally long sequences it is ours."""
    groups, length = np.array([1, 0, 1, 0, 1, 1]), 5
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rewards, log_weights = rng.standard_normal((2, len(groups)))
        logprobs = -rng.exponential(size=(len(groups), length))
        # sum_v pi_v^2 lies between these for a token of probability pi: the rest is spread thin, or is one token.
        probs = np.exp(logprobs)
        collision = probs**2 + rng.random(probs.shape) * (1 - probs) ** 2
        theirs = ask(
            "verl",
            "optimal_baseline_advantages",
            rewards=rewards,
            weights=np.exp(log_weights)[:, None].repeat(length, axis=1),
            logprobs=logprobs,
            collision=collision,
            groups=groups,
        )
        ids = packed(np.arange(len(groups)).repeat(length))
        everywhere = torch.ones(logprobs.size, dtype=torch.bool)
        norms = score_norms(packed(logprobs.ravel()), packed(collision.ravel()), everywhere, ids, len(groups))
        found = opob(packed(rewards), packed(groups), log_weights=packed(log_weights), score_norms=norms)
        assert_equal(found.numpy(), theirs[:, -1])
