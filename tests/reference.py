"""Slow NumPy float64 references for the algorithms, each written as its paper writes it.

A batch is a list of sequences; a sequence is a float64 array of its trained tokens, without packing or mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Batch = list[Array]


def numeric_gradient(loss: Callable[[Batch], float], theta: Batch, step: float = 1e-6) -> Array:
    """Central differences of ``loss`` in every entry of ``theta``, concatenated over sequences."""
    gradient = []
    for i, sequence in enumerate(theta):
        for t in range(len(sequence)):
            sides = []
            for sign in (1.0, -1.0):
                moved = [s.copy() for s in theta]
                moved[i][t] += sign * step
                sides.append(loss(moved))
            gradient.append((sides[0] - sides[1]) / (2 * step))
    return np.array(gradient)


# How a loss a token becomes one number.


def token_mean(losses: Batch) -> float:
    return float(np.concatenate(losses).mean())


def sequence_mean_of_token_means(losses: Batch) -> float:
    return float(np.mean([s.mean() for s in losses]))


def sequence_mean_of_token_sums(losses: Batch) -> float:
    return float(np.mean([s.sum() for s in losses]))


def constant_length(length: float) -> Callable[[Batch], float]:
    return lambda losses: float(np.mean([s.sum() / length for s in losses]))


# Policy losses a token.


def ppo_tokens(theta: Batch, old: Batch, adv: Batch, low: float, high: float, dual: float | None = None) -> Batch:
    """PPO (1707.06347): -min(r A, clip(r, 1-low, 1+high) A); for A < 0 dual clip (1912.09729) bounds it by dual A."""
    losses = []
    for new, before, a in zip(theta, old, adv, strict=True):
        r = np.exp(new - before)
        objective = np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
        if dual is not None:
            objective = np.where(a < 0, np.maximum(objective, dual * a), objective)
        losses.append(-objective)
    return losses


def weighted(losses: Batch, weights: Batch) -> Batch:
    return [w * s for w, s in zip(weights, losses, strict=True)]


def behavior_weights(prox: Batch, mu: Batch) -> Batch:
    return [np.exp(p - m) for p, m in zip(prox, mu, strict=True)]


def truncated(weights: Batch, high: float) -> Batch:
    return [np.minimum(w, high) for w in weights]


def masked_outside(weights: Batch, low: float, high: float) -> Batch:
    return [np.where((w >= low) & (w <= high), w, 0.0) for w in weights]


def geometric_weights(prox: Batch, mu: Batch) -> Batch:
    return [np.full(len(p), np.exp(np.mean(p - m))) for p, m in zip(prox, mu, strict=True)]


def product_weights(prox: Batch, mu: Batch) -> Batch:
    return [np.full(len(p), np.prod(np.exp(p - m))) for p, m in zip(prox, mu, strict=True)]


def reinforce_tokens(theta: Batch, adv: Batch) -> Batch:
    return [-a * s for a, s in zip(adv, theta, strict=True)]


def cispo_tokens(theta: Batch, now: Batch, old: Batch, adv: Batch, low: float, high: float) -> Batch:
    """CISPO (2506.13585): -sg(clip(r)) A log pi; ``now`` is theta's value, where the detached ratio is taken."""
    return [-np.clip(np.exp(n - o), low, high) * a * s for s, n, o, a in zip(theta, now, old, adv, strict=True)]


def band_tokens(theta: Batch, old: Batch, adv: Batch, low: float, high: float) -> Batch:
    """-r A inside the band and a constant outside."""
    losses = []
    for new, before, a in zip(theta, old, adv, strict=True):
        r = np.exp(new - before)
        losses.append(np.where((r > low) & (r < high), -r * a, 0.0))
    return losses


# Policy losses a sequence: one advantage each.


def rloo(theta: Batch, adv: Sequence[float]) -> float:
    """2402.14740: the mean over sequences of -A log pi(sequence)."""
    return float(np.mean([-a * s.sum() for s, a in zip(theta, adv, strict=True)]))


def gspo(theta: Batch, old: Batch, adv: Sequence[float], low: float, high: float) -> float:
    """2507.18071: s = (pi / pi_old)^(1/|y|); the mean over sequences of -min(s A, clip(s) A)."""
    losses = []
    for new, before, a in zip(theta, old, adv, strict=True):
        s = np.exp((new - before).sum() / len(new))
        losses.append(-min(s * a, np.clip(s, 1 - low, 1 + high) * a))
    return float(np.mean(losses))


def sequence_ppo(theta: Batch, old: Batch, adv: Sequence[float], low: float, high: float) -> float:
    """Proximal RLOO: PPO's clip on the probability ratio of the whole sequence."""
    losses = []
    for new, before, a in zip(theta, old, adv, strict=True):
        r = np.exp(new.sum()) / np.exp(before.sum())
        losses.append(-min(r * a, np.clip(r, 1 - low, 1 + high) * a))
    return float(np.mean(losses))


# Advantages.


def loo_advantages(rewards: Sequence[float]) -> list[float]:
    """RLOO: each reward less the mean of all the others."""
    return [r - np.mean([o for j, o in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]


def grpo_advantages(rewards: Sequence[float], eps: float) -> list[float]:
    return [(r - np.mean(rewards)) / (np.std(rewards, ddof=1) + eps) for r in rewards]


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """1506.02438, as the double sum: A_t = sum_l (gamma lam)^l delta_{t+l}; and the returns A + V."""
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    steps = len(rewards)
    adv = np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, steps)) for t in range(steps)])
    return adv, adv + values


# KL, critic, diagnostics.


def k1(policy: Array, ref: Array) -> Array:
    return policy - ref


def k2(policy: Array, ref: Array) -> Array:
    return (policy - ref) ** 2 / 2


def k3(policy: Array, ref: Array) -> Array:
    return np.exp(ref - policy) - 1 - (ref - policy)


def value_tokens(values: Batch, old: Batch, returns: Batch, clip: float) -> Batch:
    return [
        0.5 * np.maximum((v - r) ** 2, (np.clip(v, o - clip, o + clip) - r) ** 2)
        for v, o, r in zip(values, old, returns, strict=True)
    ]


def ess(weights: Array) -> float:
    return float(weights.sum() ** 2 / (weights**2).sum())
