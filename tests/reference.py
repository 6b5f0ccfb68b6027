"""Slow NumPy float64 references for the algorithms, each written as its paper writes it.

A batch is a list of sequences; a sequence is a float64 array of its trained tokens, without packing or mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Batch = list[Array]
Bounds = tuple[float, float]


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


def impact_tokens(theta: Batch, target: Batch, mu: Batch, adv: Batch, eps: Bounds, cap: float) -> Batch:
    """IMPACT (1912.00167) as RLlib's APPO has it, rllib/algorithms/appo/torch/appo_torch_learner.py:
    r = clip(mu / target, 0, cap) pi / mu, with cap 2 there, and -min(A r, A clip(r, 1-low, 1+high))."""
    losses = []
    for new, slow, m, a in zip(theta, target, mu, adv, strict=True):
        r = np.clip(np.exp(m - slow), 0.0, cap) * np.exp(new - m)
        losses.append(-np.minimum(a * r, a * np.clip(r, 1 - eps[0], 1 + eps[1])))
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


def sapo_tokens(theta: Batch, old: Batch, adv: Batch, tau_positive: float, tau_negative: float) -> Batch:
    """SAPO (2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A."""
    losses = []
    for new, before, a in zip(theta, old, adv, strict=True):
        tau = np.where(a > 0, tau_positive, tau_negative)
        losses.append(-4 / tau / (1 + np.exp(-tau * (np.exp(new - before) - 1))) * a)
    return losses


def vespo_tokens(theta: Batch, now: Batch, mu: Batch, adv: Batch, positive: Bounds, negative: Bounds) -> Batch:
    """VESPO (2602.10693): -sg(phi(w)) A log pi, phi = e^lambda w^k e^(-lambda w); bounds are (k, lambda)."""
    losses = []
    for new, w, a in zip(theta, product_weights(now, mu), adv, strict=True):
        k, lam = np.where(a >= 0, positive[0], negative[0]), np.where(a >= 0, positive[1], negative[1])
        losses.append(-np.exp(lam) * w**k * np.exp(-lam * w) * a * new)
    return losses


def dppo_tokens(theta: Batch, now: Batch, mu: Batch, adv: Batch, low: float, high: float, cap: float) -> Batch:
    """DPPO (2602.04879): -sg(M min(r, cap)) A log pi; M drops what moved over high, or under -low, with A's sign."""
    losses = []
    for new, n, m, a in zip(theta, now, mu, adv, strict=True):
        moved = np.exp(n) - np.exp(m)
        dropped = ((a > 0) & (moved > high)) | ((a < 0) & (moved < -low))
        losses.append(np.where(dropped, 0.0, -np.minimum(np.exp(n - m), cap) * a * new))
    return losses


def topr_tokens(theta: Batch, now: Batch, mu: Batch, adv: Batch, low: float, high: float) -> Batch:
    """TOPR (2503.14286): full weight for rewards >= 0, the clipped sequence ratio for those below."""
    weights = product_weights(now, mu)
    return [-np.where(a >= 0, 1.0, np.clip(w, low, high)) * a * s for s, w, a in zip(theta, weights, adv, strict=True)]


def kept_surrogate(theta: Batch, old: Batch, adv: Batch, keep: Batch) -> Batch:
    """-r A where ``keep``."""
    return [np.where(k > 0, -np.exp(s - o) * a, 0.0) for s, o, a, k in zip(theta, old, adv, keep, strict=True)]


# Gates: 1 for a token that stays.


def m2_keep(now: Batch, mu: Batch, adv: Batch, threshold: float, *, all_tokens: bool = False) -> Batch:
    """M2PO (2510.01161), Algorithm 1: M is true for all tokens; T is the set of trust-region tokens; while the mean
    over T of (log r)^2 is above the threshold, the largest leaves T, and its M becomes false.

    T as the authors' code has it (Infini-AI-Lab/M2PO, ``_get_trust_region_tokens_delta_sq``): A > 0 and r > 1, or
    A < 0 and r < 1. ``all_tokens``: every token, as AReaL's code has it.
    """
    keep = [np.ones(len(s)) for s in now]
    region = {}
    for i, (n, m, a) in enumerate(zip(now, mu, adv, strict=True)):
        r = np.exp(n - m)
        for t in range(len(n)):
            if all_tokens or (a[t] > 0 and r[t] > 1) or (a[t] < 0 and r[t] < 1):
                region[i, t] = np.log(r[t]) ** 2
    while region and np.mean(list(region.values())) > threshold:
        i, t = max(region, key=lambda place: region[place])
        del region[i, t]
        keep[i][t] = 0.0
    return keep


def sat_interval(log_ratio: Array, quantile: float, low: float, high: float, sign: Array) -> tuple[Array, Array]:
    """SAT (2607.18722): each token's interval of ratios; the side of A's sign is narrowed above the quantile."""
    q = np.quantile(np.abs(log_ratio), quantile, method="inverted_cdf")
    room = np.array([q / abs(x) if abs(x) > q else 1.0 for x in log_ratio])
    return 1 - low * np.where(sign < 0, room, 1.0), 1 + high * np.where(sign > 0, room, 1.0)


def opsm_keep(now: Batch, mu: Batch, adv: Batch, delta: float) -> Batch:
    return [np.where((a < 0) & (np.mean(m - n) > delta), 0.0, 1.0) for n, m, a in zip(now, mu, adv, strict=True)]


def estr_keep(now: Batch, mu: Batch, entropy: Batch, tau: float) -> Batch:
    """ESTR (2607.22186): S = delta^2 / (H + 0.01) <= tau, delta the token's log-ratio and H the entropy."""
    return [((n - m) ** 2 / (h + 0.01) <= tau).astype(float) for n, m, h in zip(now, mu, entropy, strict=True)]


def binary_kl_keep(now: Batch, mu: Batch, delta: float) -> Batch:
    """FlashREINFORCE: each sequence whose tokens' KL of (p, 1 - p) from (q, 1 - q) is on average at most delta, p being
    the sampler's probability of the token and q the policy's."""
    keep = []
    for n, m in zip(now, mu, strict=True):
        p, q = np.exp(m), np.exp(n)
        rest_p, rest_q = np.maximum(1 - p, 1e-6), np.maximum(1 - q, 1e-6)
        divergence = p * np.log(p / q) + rest_p * np.log(rest_p / rest_q)
        keep.append(np.full(len(n), float(np.mean(divergence) <= delta)))
    return keep


def a3po_proximal(now: Batch, mu: Batch, lag: Batch) -> Batch:
    """A-3PO (2512.06547): mu + alpha (theta - mu), alpha = (d - 1) / d."""
    alphas = [(np.maximum(d, 1) - 1) / np.maximum(d, 1) for d in lag]
    return [m + a * (n - m) for n, m, a in zip(now, mu, alphas, strict=True)]


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


def gmpo(theta: Batch, old: Batch, adv: Sequence[float], low: float, high: float) -> float:
    """2507.20673: -(prod_t min(r^s, clip(r, e^-low, e^high)^s)^s)^(1/|y|) A with s the sign of A."""
    losses = []
    for new, before, a in zip(theta, old, adv, strict=True):
        r, s = np.exp(new - before), np.sign(a)
        held = np.minimum(r**s, np.clip(r, np.exp(-low), np.exp(high)) ** s) ** s
        losses.append(-(np.prod(held) ** (1 / len(new))) * a)
    return float(np.mean(losses))


# Heads: the sum over one group, from its log-ratios D_i = sum_t (theta - anchor) and rewards.


def tba(d: Array, now: Array, rewards: Array, beta: float) -> float:
    """2503.18929: (log Z + D - R / beta)^2; log Z is the group's mean of R / beta - D, detached."""
    log_z = np.mean(rewards / beta - now)
    return float(np.sum((log_z + d - rewards / beta) ** 2))


def copg(d: Array, rewards: Array, beta: float) -> float:
    """2406.19185: all pairs' squared differences of R - beta D, over K - 1."""
    x = rewards - beta * d
    pairs = [(x[i] - x[j]) ** 2 for i in range(len(x)) for j in range(i)]
    return float(np.sum(pairs)) / max(1, len(x) - 1)


def opmd(d: Array, rewards: Array, tau: float) -> float:
    """2501.12599: -(R - mean R) log pi + tau / 2 D^2; D for log pi adds a constant."""
    return float(np.sum(-(rewards - rewards.mean()) * d + tau / 2 * d**2))


def a_star(d: Array, rewards: Array, beta1: float, beta2: float) -> float:
    """A*PO (2505.20686), OAPL (2602.19362): (beta2 D - (R - V))^2, V = beta1 log mean exp(R / beta1)."""
    value = beta1 * np.log(np.mean(np.exp(rewards / beta1)))
    return float(np.sum((beta2 * d - (rewards - value)) ** 2))


def over_pairs(loss: Callable[[float], float], d: Array, rewards: Array) -> float:
    """The mean of ``loss(D_w - D_l)`` over every best w and worst l; 0 where the best is no better than the worst."""
    if rewards.max() == rewards.min():
        return 0.0
    best, worst = np.flatnonzero(rewards == rewards.max()), np.flatnonzero(rewards == rewards.min())
    return float(np.mean([loss(d[w] - d[lose]) for w in best for lose in worst]))


def dpo(beta: float) -> Callable[[float], float]:
    return lambda gap: float(-np.log(1 / (1 + np.exp(-beta * gap))))


def ipo(beta: float) -> Callable[[float], float]:
    return lambda gap: float((gap - 1 / (2 * beta)) ** 2)


def best_of_n(d: Array, rewards: Array) -> float:
    """-log pi of the best; the mean where several are."""
    return 0.0 if rewards.max() == rewards.min() else float(-np.mean(d[rewards == rewards.max()]))


# Advantages.


def loo_advantages(rewards: Sequence[float]) -> list[float]:
    """RLOO: each reward less the mean of all the others."""
    return [r - np.mean([o for j, o in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]


def grpo_advantages(rewards: Sequence[float], eps: float) -> list[float]:
    return [(r - np.mean(rewards)) / (np.std(rewards, ddof=1) + eps) for r in rewards]


def maxrl_advantages(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [r / mean - 1 if mean > 0 else 0.0 for r in rewards]


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """1506.02438, as the double sum: A_t = sum_l (gamma lam)^l delta_{t+l}; and the returns A + V."""
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    steps = len(rewards)
    adv = np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, steps)) for t in range(steps)])
    return adv, adv + values


def vtrace(rewards: Array, values: Array, ratio: Array, gamma: float, lam: float, bars: Bounds) -> tuple[Array, Array]:
    """1802.01561, as the sum: v_s = V_s + sum_t gamma^(t-s) (prod_{i<t} c_i) delta_t; and the advantages' ones."""
    rho, c = np.minimum(ratio, bars[0]), lam * np.minimum(ratio, bars[1])
    delta = rho * (rewards + gamma * np.append(values[1:], 0.0) - values)
    steps = len(rewards)
    v = np.array(
        [values[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, steps)) for s in range(steps)]
    )
    return rho * (rewards + gamma * np.append(v[1:], 0.0) - values), v


def opob_baseline(rewards: Array, weights: Array, norms: Array) -> float:
    """VCPO (2602.17616): sum w^2 g^2 R / sum w^2 g^2."""
    return float((weights**2 * norms * rewards).sum() / (weights**2 * norms).sum())


# KL, critic, diagnostics.


def k1(policy: Array, ref: Array) -> Array:
    return policy - ref


def k2(policy: Array, ref: Array) -> Array:
    return (policy - ref) ** 2 / 2


def k3(policy: Array, ref: Array) -> Array:
    return np.exp(ref - policy) - 1 - (ref - policy)


def forward_kl_tokens(policy: Batch, ref: Batch, mu: Batch, cap: float) -> Batch:
    """min(ref / mu, cap) (log ref - log policy): KL(ref || policy) a token on samples of mu (GKD, 2306.13649)."""
    return [np.minimum(np.exp(r - m), cap) * (r - p) for p, r, m in zip(policy, ref, mu, strict=True)]


def value_tokens(values: Batch, old: Batch, returns: Batch, clip: float) -> Batch:
    return [
        0.5 * np.maximum((v - r) ** 2, (np.clip(v, o - clip, o + clip) - r) ** 2)
        for v, o, r in zip(values, old, returns, strict=True)
    ]


def ess(weights: Array) -> float:
    return float(weights.sum() ** 2 / (weights**2).sum())
