"""Sampling: counter-based uniforms, the processed distribution (temperature, top-k, top-p), one draw from it a row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

UIntArray = NDArray[np.uint64]
DoubleArray = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_TOP_P_CANDIDATES = 1024
_CDF_BLOCK = 256


def _mix(x: UIntArray) -> UIntArray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def seed_state(seed: int) -> np.uint64:
    """The start of a request's stream; mixed, so that neighbouring seeds share no part of their streams."""
    state: np.uint64 = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN)[0]
    return state


def uniforms(states: UIntArray, counters: NDArray[np.int64]) -> DoubleArray:
    """Draw ``counters[i]`` of the stream ``states[i]``: [n] numbers inside (0, 1), a function of the two alone."""
    bits = _mix(states + _GOLDEN * (counters.astype(np.uint64) + np.uint64(1)))
    # 48 bits: u * total stays below total in double precision, so that a draw never falls off the end.
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def process_logits(
    logits: torch.Tensor, temperature: DoubleArray, top_p: DoubleArray, top_k: NDArray[np.int64]
) -> torch.Tensor:
    """Log-probs [n, V] in float32 of the distribution that is sampled: temperature, then top-k, then top-p.

    Every row has its own settings. ``top_k=0`` and ``top_p=1`` are off; the kept tokens are renormalised; tokens that
    tie with the last kept one are kept. A greedy row (``temperature=0``) gets temperature 1 and no filter: a point
    mass has no useful log-prob.
    """
    logits = logits.float()
    sampled = temperature > 0
    if np.any(sampled & (temperature != 1.0)):
        divisor = np.where(sampled, temperature, 1.0).astype(np.float32)
        logits = logits / torch.from_numpy(divisor).to(logits.device)[:, None]
    k = np.where(sampled & (top_k > 0), np.minimum(top_k, logits.shape[-1]), logits.shape[-1])
    if k.min() < logits.shape[-1]:
        logits = _keep_top_k(logits, k)
    p = np.where(sampled, top_p, 1.0)
    if p.min() < 1.0:
        logits = _keep_top_p(logits, p)
    return torch.log_softmax(logits, dim=-1)


def _keep_top_k(logits: torch.Tensor, k: NDArray[np.int64]) -> torch.Tensor:
    vocabulary = logits.shape[-1]
    filtered = k < vocabulary
    widest = int(k[filtered].max())
    index = torch.from_numpy(np.where(filtered, k, 1) - 1).to(logits.device)[:, None]
    threshold = logits.topk(widest, dim=-1).values.gather(1, index)
    off = torch.from_numpy(~filtered).to(logits.device)[:, None]
    return logits.masked_fill((logits < threshold) & ~off, float("-inf"))


def _keep_top_p(logits: torch.Tensor, p: DoubleArray) -> torch.Tensor:
    vocabulary = logits.shape[-1]
    limit = torch.from_numpy(p).to(logits.device)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    off = limit >= 1.0
    # A full sort of a large vocabulary costs far more than the few candidates that nearly always hold the nucleus.
    for width in (min(_TOP_P_CANDIDATES, vocabulary), vocabulary):
        values = logits.topk(width, dim=-1).values
        mass = (values - total).exp().cumsum(dim=-1, dtype=torch.float64)
        if width == vocabulary or bool(((mass[:, -1:] >= limit) | off).all()):
            break
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = (mass_before < limit).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = values.gather(1, kept - 1)
    return logits.masked_fill((logits < threshold) & ~off, float("-inf"))


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token [n, 1] at which the running sum of ``weights`` [n, V] passes ``uniform`` [n, 1] times their total.

    A large vocabulary is searched by blocks, then inside the block that was hit: running sums over all of it in double
    precision would take longer than a small model's output layer.
    """
    vocabulary = weights.shape[-1]
    if vocabulary <= 4 * _CDF_BLOCK:
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % _CDF_BLOCK))
    blocks = padded.view(len(weights), -1, _CDF_BLOCK)
    mass = blocks.sum(dim=-1).double()
    cdf = mass.cumsum(dim=-1)
    target = uniform * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True)
    hit = mass.gather(1, block)
    # Where in its block the target lies; below one, so that it falls on a token of positive weight.
    inside = ((target - cdf.gather(1, block) + hit) / hit).clamp(0.0, 1 - 2.0**-48)
    chosen = blocks.gather(1, block[..., None].expand(-1, 1, _CDF_BLOCK))[:, 0]
    return block * _CDF_BLOCK + _inverse_cdf(chosen, inside)


def sample_tokens(
    logits: torch.Tensor,
    uniform: DoubleArray,
    temperature: DoubleArray,
    top_p: DoubleArray,
    top_k: NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by the inverse CDF of the processed distribution.

    ``logits`` [n, V], the others [n]. Returns tokens [n] (int64) and their log-probs [n] (float32) as
    :func:`process_logits` defines them; for a greedy row the token is the argmax.
    """
    logprobs = process_logits(logits, temperature, top_p, top_k)
    tokens = _inverse_cdf(logprobs.exp(), torch.from_numpy(uniform).to(logits.device)[:, None])
    greedy = temperature == 0
    if greedy.any():
        chosen = torch.from_numpy(greedy).to(logits.device)[:, None]
        tokens = torch.where(chosen, logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
