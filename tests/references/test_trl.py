"""Gradients, advantages and corrections against TRL's own trainers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrlhf.algorithms.advantages import SEQUENCE_ADVANTAGES
from asyncrlhf.algorithms.coefficients import COEFFICIENTS
from asyncrlhf.algorithms.gates import GateInputs, opsm_gate
from asyncrlhf.algorithms.heads import pair
from asyncrlhf.algorithms.kl import kl_loss
from asyncrlhf.algorithms.masked import masked_values, segment_sum
from asyncrlhf.algorithms.weights import behavior_weight
from tests.references.isolated import Peers, named, require
from tests.references.layout import assert_equal, batches, our_gradient, packed, padded, per_token, tables
from tests.unit.algorithms.batches import RaggedBatch

pytestmark = pytest.mark.more

LENGTH = 16  # Dr. GRPO's constant

CLIP = COEFFICIENTS["clip"](0.2, 0.28)
TRL_CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}

# Case: (trainer, TRL's settings, our rule, our other switches).
LOSSES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "dapo": ("grpo", {"loss_type": "dapo", **TRL_CLIP}, CLIP, {"aggregate": "token"}),
    "bnpo": ("grpo", {"loss_type": "bnpo", **TRL_CLIP}, CLIP, {"aggregate": "token"}),
    "grpo": ("grpo", {"loss_type": "grpo", **TRL_CLIP}, CLIP, {"aggregate": "seq_mean"}),
    "dr_grpo": (
        "grpo",
        {"loss_type": "dr_grpo", "max_completion_length": LENGTH, **TRL_CLIP},
        CLIP,
        {"aggregate": "const", "constant_length": LENGTH},
    ),
    # TRL's delta bounds the ratio where A < 0, which is our dual clip.
    "grpo_delta": (
        "grpo",
        {"loss_type": "grpo", "delta": 1.5, **TRL_CLIP},
        COEFFICIENTS["clip"](0.2, 0.28, 1.5),
        {"aggregate": "seq_mean"},
    ),
    "gspo": (
        "grpo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        COEFFICIENTS["clip"](0.05, 0.06),
        {"level": "geo", "aggregate": "seq_mean"},
    ),
    # Both bounds are on the ratio itself here; TRL has no lower one.
    "cispo": ("grpo", {"loss_type": "cispo", "epsilon_high": 1.3}, COEFFICIENTS["cap"](0.0, 1.3), {}),
    "sapo": (
        "grpo",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.4},
        COEFFICIENTS["soft"](1.0, 1.4),
        {"aggregate": "seq_mean"},
    ),
    "vespo": ("grpo", {"loss_type": "vespo"}, COEFFICIENTS["gamma"](2.0, 3.0, 3.0, 2.0), {"level": "prod"}),
    "gmpo": (
        "gmpo",
        {"epsilon_low": 0.3, "epsilon_high": 0.4},
        COEFFICIENTS["geoclip"](0.3, 0.4),
        {"aggregate": "seq_mean"},
    ),
    "proximal_rloo": ("rloo", TRL_CLIP, CLIP, {"level": "prod", "aggregate": "seq_sum"}),
}


@pytest.fixture(autouse=True)
def installed() -> None:
    require("trl")


def sequence_advantages(batch: RaggedBatch) -> Any:
    return batch.rewards[batch.trained]


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: named("trl", case))
def test_gradient_of_the_policy_loss(ask: Peers, case: str) -> None:
    trainer, settings, rule, switches = LOSSES[case]
    for batch in batches():
        theirs = ask(
            "trl",
            "gradient",
            trainer=trainer,
            **tables(batch),
            advantages=sequence_advantages(batch),
            inputs={},
            **settings,
        )
        ours = our_gradient(batch, rule, advantages=per_token(batch, batch.rewards), **switches)
        assert_equal(ours, theirs)


@pytest.mark.parametrize("weighted", [False, True], ids=lambda w: named("trl", f"kl_k3{'_importance_weighted' * w}"))
def test_gradient_with_the_kl_in_the_loss(ask: Peers, weighted: bool) -> None:
    beta = 0.3
    for batch in batches():
        theirs = ask(
            "trl",
            "gradient",
            trainer="grpo",
            **tables(batch),
            advantages=sequence_advantages(batch),
            inputs={"ref_per_token_logps": padded(batch, batch.ref)},
            beta=beta,
            use_bias_correction_kl=weighted,
            **TRL_CLIP,
        )

        def kl(theta: Any, count: Any, batch: RaggedBatch = batch) -> Any:
            return beta * kl_loss(
                theta,
                packed(batch.ref),
                packed(batch.prox),
                *batch.tensors(),
                estimator="k3",
                normaliser=count,
                importance_weighted=weighted,
            )

        advantages = per_token(batch, batch.rewards)
        assert_equal(our_gradient(batch, CLIP, advantages=advantages, extra_loss=kl), theirs)


@pytest.mark.parametrize("threshold", [0.02, 0.2], ids=lambda t: named("trl", f"opsm_{t}"))
def test_gradient_under_off_policy_sequence_masking(ask: Peers, threshold: float) -> None:
    dropped = 0
    for batch in batches():
        theirs = ask(
            "trl",
            "gradient",
            trainer="grpo",
            **tables(batch),
            advantages=sequence_advantages(batch),
            inputs={"sampling_per_token_logps": padded(batch, batch.mu)},
            off_policy_mask_threshold=threshold,
            **TRL_CLIP,
        )
        advantages = per_token(batch, batch.rewards)
        mask, ids = batch.tensors()
        theta, mu, gains = packed(batch.theta), packed(batch.mu), packed(advantages)
        gate = opsm_gate(GateInputs(theta, mu, mu, gains, mask, ids), threshold)
        dropped += int((~gate & mask).sum())
        assert_equal(our_gradient(batch, CLIP, advantages=advantages, gate=gate), theirs)
    assert dropped, "no sequence was masked, so that nothing was compared"


# TRL's mode: ours. Its truncation has no lower bound unless given; its mask has both.
CORRECTIONS = {
    "token_truncate": {"level": "token", "mode": "truncate", "low": 0.0, "high": 1.2},
    "token_mask": {"level": "token", "mode": "mask", "low": 0.8, "high": 1.3},
    "sequence_truncate": {"level": "prod", "mode": "truncate", "low": 0.0, "high": 1.2},
    "sequence_mask": {"level": "prod", "mode": "mask", "low": 0.5, "high": 1.5},
}


@pytest.mark.parametrize("mode", CORRECTIONS, ids=lambda mode: named("trl", mode))
def test_gradient_under_a_correction_for_the_sampler(ask: Peers, mode: str) -> None:
    """TIS and MIS: the weights as TRL makes them after generation, then its loss with them."""
    ours = CORRECTIONS[mode]
    cut = 0.0
    for batch in batches():
        made = ask(
            "trl",
            "scored",
            old=padded(batch, batch.prox),
            sampled=padded(batch, batch.mu),
            mask=tables(batch)["mask"],
            rewards=sequence_advantages(batch),
            group_size=1,
            scale_rewards="none",
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=ours["low"] or None,
            vllm_importance_sampling_clip_max=ours["high"],
        )
        theirs = ask(
            "trl",
            "gradient",
            trainer="grpo",
            **tables(batch),
            advantages=sequence_advantages(batch),
            inputs={"importance_sampling_ratio": made["importance_sampling_ratio"]},
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            **TRL_CLIP,
        )
        weight, counts = behavior_weight(packed(batch.prox), packed(batch.mu), *batch.tensors(), **ours)
        cut += float(counts["behavior_truncated_fraction"] + counts["behavior_masked_fraction"])
        advantages = per_token(batch, batch.rewards)
        assert_equal(our_gradient(batch, CLIP, advantages=advantages, weight=weight), theirs)
    assert cut > 0


@pytest.mark.parametrize("case", ["vespo_behavior"], ids=lambda case: named("trl", case))
def test_gradient_of_vespo_from_the_sampler(ask: Peers, case: str) -> None:
    """TRL's w is the product of theta / old and old / mu, which is our product ratio to the anchor mu."""
    for batch in batches(spread=0.2):
        ratio = np.exp(padded(batch, batch.prox) - padded(batch, batch.mu))
        theirs = ask(
            "trl",
            "gradient",
            trainer="grpo",
            **tables(batch),
            advantages=sequence_advantages(batch),
            inputs={"importance_sampling_ratio": ratio},
            loss_type="vespo",
        )
        advantages = per_token(batch, batch.rewards)
        rule = COEFFICIENTS["gamma"](2.0, 3.0, 3.0, 2.0)
        assert_equal(our_gradient(batch, rule, advantages=advantages, anchor=batch.mu, level="prod"), theirs)


@pytest.mark.parametrize(
    ("scale", "ours"),
    [("group", "group_norm"), ("none", "group_mean")],
    ids=[named("trl", "group_norm"), named("trl", "group_mean")],
)
def test_advantages(ask: Peers, scale: str, ours: str) -> None:
    size, groups = 4, 3
    rng = np.random.default_rng(0)
    rewards = np.concatenate([rng.standard_normal(size * (groups - 1)), np.ones(size)])
    nothing = np.zeros((size * groups, 2))
    theirs = ask(
        "trl",
        "scored",
        old=nothing,
        sampled=nothing,
        mask=nothing + 1,
        rewards=rewards,
        group_size=size,
        scale_rewards=scale,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=2.0,
    )
    found = SEQUENCE_ADVANTAGES[ours](packed(rewards), packed(np.arange(groups).repeat(size)))
    assert_equal(found.numpy(), theirs["advantages"])


@pytest.mark.parametrize(
    ("loss_type", "kind"), [("sigmoid", "dpo"), ("ipo", "ipo")], ids=[named("trl", "online_dpo"), named("trl", "ipo")]
)
def test_gradient_of_the_pair_head(ask: Peers, loss_type: str, kind: str) -> None:
    compared = 0
    for batch in batches():
        pairs = len(batch.trained) // 2
        if not pairs or len(batch.trained) != batch.num_sequences or batch.num_sequences % 2:
            continue
        compared += 1
        mask, ids = batch.tensors()
        theirs = ask(
            "trl",
            "online_dpo_gradient",
            theta=padded(batch, batch.theta),
            ref=padded(batch, batch.ref),
            mask=tables(batch)["mask"],
            rewards=batch.rewards,
            loss_type=loss_type,
            beta=0.2,
        )
        drift = segment_sum(masked_values(packed(batch.theta) - packed(batch.ref), mask), ids, batch.num_sequences)
        # TRL puts the second completions behind all the first ones.
        group_ids = packed(np.tile(np.arange(pairs), 2))
        coefficients, _ = pair(drift, packed(batch.rewards), group_ids, beta=0.2, kind=kind)
        # TRL's is the mean over pairs, ours over sequences.
        ours = our_gradient(
            batch,
            COEFFICIENTS["one"](),
            advantages=per_token(batch, coefficients.numpy()),
            aggregate="seq_sum",
            normaliser=pairs,
        )
        assert_equal(ours, theirs)
    assert compared
