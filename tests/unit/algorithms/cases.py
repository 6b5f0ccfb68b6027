"""Every policy-gradient preset twice: the loss as its paper writes it, and the switches that should give its gradient.

Bounds are not the presets' but such that each rule acts on some tokens of the random batches, and not on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.algorithms.coefficients import Coefficient, band, cap, clip, dprob, gamma, geoclip, one, signed, soft
from asyncrlhf.algorithms.gates import GateInputs, binary_kl_gate, entropy_gate, m2_gate, opsm_gate, sat_gate
from asyncrlhf.algorithms.losses import PolicyLoss, policy_loss
from asyncrlhf.algorithms.weights import behavior_weight, interpolated_proximal, log_ratio, target_anchor
from tests import reference
from tests.reference import Batch
from tests.unit.algorithms.batches import RaggedBatch
from tests.unit.algorithms.gains import (
    CENTRED,
    GAE,
    GIVEN,
    LOO,
    MEAN,
    NORM,
    OPOB,
    RAW,
    SHARE,
    SHIFTED,
    WHITENED,
    Gain,
    vtrace,
)

LENGTH = 11.0
IMPACT_CAP = 1.3  # mu is above 1.3 times the target on many tokens of these batches, and above twice on some
Aggregate = Callable[[Batch], float]
Paper = Callable[[RaggedBatch, Batch, Batch], float]  # batch, theta and advantages of the trained tokens


@dataclass(frozen=True)
class Case:
    paper: Paper
    coefficient: Coefficient
    gain: Gain
    level: str = "token"
    aggregate: str = "token"
    anchor: str | None = "prox"
    correction: dict[str, Any] | None = None
    gate: Callable[[RaggedBatch, Tensor], Tensor] | None = None


def run(
    case: Case,
    batch: RaggedBatch,
    theta: Tensor,
    *,
    advantages: Tensor | None = None,
    sequences: list[int] | None = None,
    normaliser: float | None = None,
    sample_weights: NDArray[np.float64] | None = None,
    ratio_bound: float = np.inf,
) -> PolicyLoss:
    """The kernel on ``batch``, or on some of its sequences only as a microbatch would hold them."""
    mask, ids = batch.tensors()
    kept = torch.ones_like(mask) if sequences is None else torch.isin(ids, torch.tensor(sequences))
    advantages = case.gain.ours(batch) if advantages is None else advantages
    keep = None if case.gate is None else case.gate(batch, advantages)[kept]
    mask, ids = mask[kept], torch.unique(ids[kept], return_inverse=True)[1]
    mu = torch.from_numpy(batch.mu)
    interpolated = interpolated_proximal(torch.from_numpy(batch.theta), mu, torch.from_numpy(batch.lag))
    anchors = {"mu": mu, "prox": torch.from_numpy(batch.prox), "interp": interpolated}
    anchors["ema"] = torch.from_numpy(batch.target)
    anchors["impact"] = target_anchor(torch.from_numpy(batch.target), mu, IMPACT_CAP)
    weight = None
    if case.correction is not None:
        between = anchors[case.anchor or "prox"]
        weight = behavior_weight(between[kept], mu[kept], mask, ids, ratio_bound=ratio_bound, **case.correction)[0]
    length = LENGTH if case.aggregate == "const" else None
    return policy_loss(
        theta[kept],
        None if case.anchor is None else anchors[case.anchor][kept],
        advantages[kept],
        mask,
        ids,
        coefficient=case.coefficient,
        level=case.level,
        aggregate=case.aggregate,
        weight=weight,
        gate=keep,
        normaliser=normaliser_count(case.aggregate, mask, ids, constant_length=length)
        if normaliser is None
        else normaliser,
        sample_weights=None if sample_weights is None else torch.from_numpy(sample_weights),
        ratio_bound=ratio_bound,
    )


# Papers.


def _ppo(
    low: float,
    high: float,
    *,
    dual: float | None = None,
    aggregate: Aggregate = reference.token_mean,
    old: str = "prox",
    weights: Callable[[RaggedBatch], Batch] | None = None,
) -> Paper:
    def paper(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
        losses = reference.ppo_tokens(theta, b.split(getattr(b, old)), adv, low, high, dual)
        return aggregate(losses if weights is None else reference.weighted(losses, weights(b)))

    return paper


def _weights(change: Callable[..., Batch], *bounds: float, kind: Any = reference.behavior_weights) -> Any:
    return lambda b: change(kind(b.split(b.prox), b.split(b.mu)), *bounds)


def _sequence(loss: Callable[..., float], old: str, *bounds: float) -> Paper:
    return lambda b, theta, adv: loss(theta, b.split(getattr(b, old)), [a[0] for a in adv], *bounds)


def _detached(
    tokens: Callable[..., Batch], old: str, *bounds: Any, aggregate: Aggregate = reference.token_mean
) -> Paper:
    """A loss whose weight is taken at theta's present value."""
    return lambda b, theta, adv: aggregate(tokens(theta, b.split(b.theta), b.split(getattr(b, old)), adv, *bounds))


def _reinforce(aggregate: Aggregate, weights: Callable[[RaggedBatch], Batch] | None = None) -> Paper:
    def paper(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
        losses = reference.reinforce_tokens(theta, adv)
        return aggregate(losses if weights is None else reference.weighted(losses, weights(b)))

    return paper


def _sapo(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    return reference.sequence_mean_of_token_means(reference.sapo_tokens(theta, b.split(b.prox), adv, 1.0, 1.05))


def _band(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    return reference.token_mean(reference.band_tokens(theta, b.split(b.mu), adv, 0.7, 1.6))


def _a3po(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    mu = b.split(b.mu)
    prox = reference.a3po_proximal(b.split(b.theta), mu, b.split(b.lag))
    weights = reference.masked_outside(reference.behavior_weights(prox, mu), 0.0, 1.3)
    return reference.token_mean(reference.weighted(reference.ppo_tokens(theta, prox, adv, 0.1, 0.1), weights))


def _m2po(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    mu = b.split(b.mu)
    keep = reference.m2_keep(b.split(b.theta), mu, adv, 0.15)
    return reference.token_mean(reference.kept_surrogate(theta, mu, adv, keep))


def _sat(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    """PPO's min(r A, clip(r, lower, upper) A) with every token's own bounds."""
    mu = b.split(b.mu)
    drift = np.concatenate([n - m for n, m in zip(b.split(b.theta), mu, strict=True)])
    a = np.concatenate(adv)
    lower, upper = reference.sat_interval(drift, 0.5, 0.2, 0.3, np.sign(a))
    r = np.exp(np.concatenate(theta) - np.concatenate(mu))
    return float(np.mean(-np.minimum(r * a, np.clip(r, lower, upper) * a)))


def _opsm(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    keep = reference.opsm_keep(b.split(b.theta), b.split(b.mu), adv, 0.05)
    losses = reference.ppo_tokens(theta, b.split(b.prox), adv, 0.2, 0.3)
    return reference.token_mean(reference.weighted(losses, keep))


def _flash(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    mu = b.split(b.mu)
    keep = reference.binary_kl_keep(b.split(b.theta), mu, 0.04)
    return reference.sequence_mean_of_token_means(reference.kept_surrogate(theta, mu, adv, keep))


def _ewma(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    target = b.split(b.target)
    weights = reference.masked_outside(reference.behavior_weights(target, b.split(b.mu)), 0.0, 1.5)
    return reference.token_mean(reference.weighted(reference.ppo_tokens(theta, target, adv, 0.2, 0.3), weights))


def _estr(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    mu = b.split(b.mu)
    keep = reference.estr_keep(b.split(b.theta), mu, b.split(b.entropy), 0.5)
    return reference.token_mean(reference.weighted(reference.ppo_tokens(theta, mu, adv, 0.2, 0.3), keep))


def _impact(b: RaggedBatch, theta: Batch, adv: Batch) -> float:
    losses = reference.impact_tokens(theta, b.split(b.target), b.split(b.mu), adv, (0.2, 0.3), IMPACT_CAP)
    return reference.token_mean(losses)


# Gates.


def _drift(b: RaggedBatch) -> Tensor:
    mask, ids = b.tensors()
    return log_ratio(torch.from_numpy(b.theta), torch.from_numpy(b.mu), mask, ids, "token")


def _m2_gate(b: RaggedBatch, adv: Tensor) -> Tensor:
    return m2_gate(_drift(b), adv, b.tensors()[0], threshold=0.15)


def _sat_gate(b: RaggedBatch, adv: Tensor) -> Tensor:
    return sat_gate(_drift(b), adv, b.tensors()[0], quantile=0.5, eps_low=0.2, eps_high=0.3)


def gate_inputs(b: RaggedBatch, adv: Tensor) -> GateInputs:
    theta, mu, entropy = (torch.from_numpy(x) for x in (b.theta, b.mu, b.entropy))
    return GateInputs(theta, mu, entropy, adv, *b.tensors())


def _gate(gate: Callable[[GateInputs, float], Tensor], delta: float) -> Callable[[RaggedBatch, Tensor], Tensor]:
    return lambda b, adv: gate(gate_inputs(b, adv), delta)


SEQUENCE_MEAN, SEQUENCE_SUM = reference.sequence_mean_of_token_means, reference.sequence_mean_of_token_sums
MASK_5 = _weights(reference.masked_outside, 0.0, 1.5)
PROD_8 = _weights(reference.truncated, 1.5, kind=reference.product_weights)
CLIP, WIDE = clip(0.2, 0.3), (0.0, 1.2)
PRESETS = {
    "reinforce": Case(_reinforce(SEQUENCE_SUM), one(), RAW, aggregate="seq_sum", anchor=None),
    "rloo": Case(_reinforce(SEQUENCE_SUM), one(), LOO, aggregate="seq_sum", anchor=None),
    "proximal_rloo": Case(
        _sequence(reference.sequence_ppo, "mu", 0.3, 0.6),
        clip(0.3, 0.6), LOO, level="prod", aggregate="seq_sum", anchor="mu",
    ),
    "reinforce_pp": Case(_ppo(0.2, 0.2), clip(0.2, 0.2), WHITENED),
    "ppo": Case(_ppo(0.2, 0.2), clip(0.2, 0.2), GAE),
    "grpo": Case(_ppo(0.2, 0.2, aggregate=SEQUENCE_MEAN), clip(0.2, 0.2), NORM, aggregate="seq_mean"),
    "grpo_mu": Case(_ppo(0.2, 0.2, old="mu"), clip(0.2, 0.2), NORM, anchor="mu"),
    "dapo": Case(_ppo(0.2, 0.28), clip(0.2, 0.28), NORM),
    "dr_grpo": Case(_ppo(0.2, 0.3, aggregate=reference.constant_length(LENGTH)), CLIP, MEAN, aggregate="const"),
    "gspo": Case(
        _sequence(reference.gspo, "prox", 0.05, 0.1), clip(0.05, 0.1), NORM, level="geo", aggregate="seq_mean"
    ),
    "gmpo": Case(_sequence(reference.gmpo, "prox", 0.2, 0.3), geoclip(0.2, 0.3), NORM, aggregate="seq_mean"),
    "cispo": Case(_detached(reference.cispo_tokens, "prox", *WIDE), cap(*WIDE), NORM),
    "aipo": Case(_detached(reference.cispo_tokens, "mu", 0.0, 1.4), cap(0.0, 1.4), NORM, anchor="mu"),
    "sapo": Case(_sapo, soft(1.0, 1.05), NORM, aggregate="seq_mean"),
    "decoupled_grpo": Case(_ppo(0.2, 0.3, weights=MASK_5), CLIP, NORM, correction={"mode": "mask", "high": 1.5}),
    "grpo_ewma": Case(_ewma, CLIP, NORM, anchor="ema", correction={"mode": "mask", "high": 1.5}),
    "maxrl": Case(_ppo(0.2, 0.3, weights=MASK_5), CLIP, SHARE, correction={"mode": "mask", "high": 1.5}),
    "a3po": Case(_a3po, clip(0.1, 0.1), NORM, anchor="interp", correction={"mode": "mask", "high": 1.3}),
    "tis": Case(
        _ppo(0.2, 0.3, weights=_weights(reference.truncated, 1.2)), CLIP, NORM, correction={"high": 1.2}
    ),
    "icepop": Case(
        _ppo(0.2, 0.3, weights=_weights(reference.masked_outside, 0.7, 1.5)),
        CLIP, NORM, correction={"mode": "mask", "low": 0.7, "high": 1.5},
    ),
    "geo_mask": Case(
        _ppo(0.2, 0.3, weights=_weights(reference.masked_outside, 0.9, 1.2, kind=reference.geometric_weights)),
        CLIP, NORM, correction={"level": "geo", "mode": "mask", "low": 0.9, "high": 1.2},
    ),
    "seq_mask": Case(
        _ppo(0.2, 0.3, weights=_weights(reference.masked_outside, 0.5, 2.0, kind=reference.product_weights)),
        CLIP, NORM, correction={"level": "prod", "mode": "mask", "low": 0.5, "high": 2.0},
    ),
    "opsm": Case(_opsm, CLIP, NORM, gate=_gate(opsm_gate, 0.05)),
    "topr": Case(
        _detached(reference.topr_tokens, "mu", 0.2, 1.0, aggregate=SEQUENCE_SUM),
        signed(0.2, 1.0), RAW, level="prod", aggregate="seq_sum", anchor="mu",
    ),
    "asymre": Case(_reinforce(SEQUENCE_SUM), one(), SHIFTED, aggregate="seq_sum", anchor=None),
    "sao": Case(_band, band(0.7, 1.6), GAE, anchor="mu"),
    "dppo": Case(_detached(reference.dppo_tokens, "mu", 0.02, 0.03, 1.6), dprob(0.02, 0.03, 1.6), NORM, anchor="mu"),
    "m2po": Case(_m2po, cap(0.0, 1e9), NORM, anchor="mu", gate=_m2_gate),
    "sat": Case(_sat, CLIP, NORM, anchor="mu", gate=_sat_gate),
    "estr": Case(_estr, CLIP, NORM, anchor="mu", gate=_gate(entropy_gate, 0.5)),
    "flash_reinforce": Case(
        _flash, cap(0.0, 1e9), CENTRED, aggregate="seq_mean", anchor="mu", gate=_gate(binary_kl_gate, 0.04)
    ),
    "vcpo": Case(
        _reinforce(SEQUENCE_MEAN, PROD_8), one(), OPOB, aggregate="seq_mean", anchor=None,
        correction={"level": "prod", "high": 1.5},
    ),
    "vespo": Case(
        _detached(reference.vespo_tokens, "mu", (2.0, 3.0), (3.0, 2.0)),
        gamma(2.0, 3.0, 3.0, 2.0), NORM, level="prod", anchor="mu",
    ),
    "impact": Case(_impact, CLIP, vtrace("target"), anchor="impact"),
    "vtrace": Case(_reinforce(reference.token_mean), one(), vtrace("prox"), anchor=None),
}  # fmt: skip

# Switches that no preset has, and every advantage a token of its own.
CASES = PRESETS | {
    "dual clip": Case(_ppo(0.2, 0.3, dual=1.5), clip(0.2, 0.3, 1.5), GIVEN),
    "tis on reinforce": Case(
        _reinforce(SEQUENCE_SUM, _weights(reference.truncated, 1.5)), one(), GIVEN, aggregate="seq_sum", anchor=None,
        correction={"high": 1.5},
    ),
    "decoupled, product truncate": Case(
        _ppo(0.2, 0.3, weights=_weights(reference.truncated, 2.0, kind=reference.product_weights)),
        CLIP, GIVEN, correction={"level": "prod", "high": 2.0},
    ),
    "soft a token": Case(
        lambda b, theta, adv: reference.token_mean(reference.sapo_tokens(theta, b.split(b.prox), adv, 0.5, 3.0)),
        soft(0.5, 3.0), GIVEN,
    ),
    "m2 a token": Case(_m2po, cap(0.0, 1e9), GIVEN, anchor="mu", gate=_m2_gate),
    "sat a token": Case(_sat, CLIP, GIVEN, anchor="mu", gate=_sat_gate),
    "estr a token": Case(_estr, CLIP, GIVEN, anchor="mu", gate=_gate(entropy_gate, 0.5)),
}  # fmt: skip
