"""Gradients and corrections against OpenRLHF's losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.algorithms.coefficients import COEFFICIENTS
from asyncrlhf.algorithms.heads import pair
from asyncrlhf.algorithms.losses import value_loss
from asyncrlhf.algorithms.weights import behavior_weight
from tests.references.isolated import Peers, named, require
from tests.references.layout import assert_equal, batches, our_gradient, packed, padded, per_token, tables
from tests.unit.algorithms.batches import gradient

pytestmark = pytest.mark.more

CLIP = COEFFICIENTS["clip"](0.2, 0.28)
THEIR_CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}

# Case: (OpenRLHF's settings, our rule, our other switches).
LOSSES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "ppo": (THEIR_CLIP, CLIP, {}),
    "ppo_seq_mean": ({"token_level_loss": False, **THEIR_CLIP}, CLIP, {"aggregate": "seq_mean"}),
    "ppo_dual_clip": ({"dual_clip": 1.5, **THEIR_CLIP}, COEFFICIENTS["clip"](0.2, 0.28, 1.5), {}),
    "gspo": (
        {"policy_loss_type": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.06},
        COEFFICIENTS["clip"](0.05, 0.06),
        {"level": "geo", "aggregate": "seq_mean"},
    ),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    require("openrlhf")


@pytest.mark.in_turn
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: named("openrlhf", case))
def test_gradient_of_the_policy_loss(ask: Peers, case: str) -> None:
    settings, rule, switches = LOSSES[case]
    for batch in batches():
        # GSPO's loss differentiates its ratio, so that its advantages have to be a sequence's.
        advantages = per_token(batch, batch.rewards) if case == "gspo" else batch.token_advantages
        theirs = ask("openrlhf", "gradient", **tables(batch), advantages=padded(batch, advantages), **settings)
        assert_equal(our_gradient(batch, rule, advantages=advantages, **switches), theirs)


BAND = {"low": 0.8, "high": 1.3}

# Case: (OpenRLHF's level and mode, our weight, our sequence mask). Its mask at sequence level rejects by the geometric
# mean, and the survivors keep their *token* weight: our uncut token weight under a geometric mask's gate.
CORRECTIONS: dict[str, tuple[tuple[str, str], dict[str, Any], dict[str, Any] | None]] = {
    "token_clip": (("token", "clip"), {"level": "token", "mode": "truncate", **BAND}, None),
    "token_mask": (("token", "mask"), {"level": "token", "mode": "mask", **BAND}, None),
    "seq_mask": (
        ("seq", "mask"),
        {"level": "token", "mode": "truncate"},
        {"level": "geo", "mode": "mask", **BAND},
    ),
}


@pytest.mark.parametrize("case", CORRECTIONS, ids=lambda case: named("openrlhf", case))
def test_gradient_under_a_correction(ask: Peers, case: str) -> None:
    (level, mode), weighting, rejection = CORRECTIONS[case]
    changed = 0
    for batch in batches():
        theirs = ask(
            "openrlhf",
            "gradient",
            **tables(batch),
            advantages=padded(batch, batch.token_advantages),
            sampled=padded(batch, batch.mu),
            is_correction_level=level,
            is_correction_mode=mode,
            is_correction_threshold=(BAND["low"], BAND["high"]),
            **THEIR_CLIP,
        )
        prox, mu = packed(batch.prox), packed(batch.mu)
        weight, _ = behavior_weight(prox, mu, *batch.tensors(), **weighting)
        gate = None if rejection is None else behavior_weight(prox, mu, *batch.tensors(), **rejection)[0] > 0
        ours = our_gradient(batch, CLIP, advantages=batch.token_advantages, weight=weight, gate=gate)
        changed += not np.allclose(ours, our_gradient(batch, CLIP, advantages=batch.token_advantages))
        assert_equal(ours, theirs)
    assert changed


@pytest.mark.parametrize("aggregate", ["token", "seq_mean"], ids=lambda how: named("openrlhf", f"value_loss_{how}"))
def test_gradient_of_the_value_loss(ask: Peers, aggregate: str) -> None:
    for batch in batches():
        mask, ids = batch.tensors()
        theirs = ask(
            "openrlhf",
            "value_gradient",
            values=padded(batch, batch.theta),
            old_values=padded(batch, batch.prox),
            returns=padded(batch, batch.values),
            mask=tables(batch)["mask"],
            clip=0.3,
            token_level_loss=aggregate == "token",
        )
        leaf = packed(batch.theta).requires_grad_()
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


@pytest.mark.parametrize("kind", ["dpo", "ipo"], ids=lambda kind: named("openrlhf", kind))
def test_coefficients_of_the_pair_head(ask: Peers, kind: str) -> None:
    pairs, beta = 5, 0.2
    chosen, rejected = np.random.default_rng(0).standard_normal((2, pairs)) * 3
    first, second = ask("openrlhf", "dpo_gradient", chosen=chosen, rejected=rejected, beta=beta, ipo=kind == "ipo")
    rewards, groups = np.repeat([1.0, 0.0], pairs), np.tile(np.arange(pairs), 2)
    coefficients, _ = pair(
        packed(np.concatenate([chosen, rejected])), packed(rewards), packed(groups), beta=beta, kind=kind
    )
    # Our coefficients are minus the gradient of the sum over pairs; theirs is of the mean.
    assert_equal(coefficients.numpy(), -pairs * np.concatenate([first, second]))
