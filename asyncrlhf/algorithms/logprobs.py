"""Log-probabilities and entropies of tokens from logits, without keeping a second copy of the logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**24  # a working set of 64 MiB in float32: large enough for speed, small beside the logits


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution: ([T], [T]), float32 (float64 for float64 logits).

    Args:
        logits: [T, V], any floating type; the softmax is taken in float32.
        targets: [T] int64.
        temperature: divides the logits; the same as in sampling makes the two log-probs comparable.
        chunk_tokens: rows worked on at once; 0 chooses by V. It changes memory, not results.

    Both results are differentiable. The backward pass recomputes the softmax chunk by chunk, so that between the two
    passes only the logits and [T] numbers are held.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} cannot divide logits; allowed: > 0.")
    rows = chunk_tokens or max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    apply = cast(Any, _TokenLogprobs.apply)
    return cast(tuple[Tensor, Tensor], apply(logits, targets, temperature, rows))


def collision_probability(logits: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 0) -> Tensor:
    """sum_v pi_v^2 of each distribution: [T], detached, float32 (float64 for float64 logits).

    Arguments as in ``token_logprobs``. It is the chance that two draws agree.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} cannot divide logits; allowed: > 0.")
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = chunk_tokens or max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    found = torch.empty(len(logits), dtype=dtype, device=logits.device)
    with torch.no_grad():
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            found[part] = (logits[part].to(dtype) / temperature).softmax(-1).square_().sum(-1)
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, rows: int) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(logits), dtype=dtype, device=logits.device)
        entropies = torch.empty_like(logprobs)
        log_totals = torch.empty_like(logprobs)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            scaled = logits[part].to(dtype) / temperature
            log_totals[part] = scaled.logsumexp(-1)
            log_p = scaled.sub_(log_totals[part, None])
            logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            entropies[part] = -_expectation(log_p.exp(), log_p)
        ctx.save_for_backward(logits, targets, log_totals, entropies)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, log_totals, entropies = ctx.saved_tensors
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.rows):
            part = slice(start, start + ctx.rows)
            log_p = (logits[part].to(log_totals.dtype) / ctx.temperature).sub_(log_totals[part, None])
            p = log_p.exp()
            # d log p_target / dz = onehot - p and dH/dz = -p (log p + H): both are p times a factor, plus the onehot.
            factor = torch.zeros_like(log_totals[part, None])
            if grad_entropies is not None:
                # A filtered token (log p = -inf, p = 0) gets zero, not NaN.
                slope = log_p.clamp_(min=torch.finfo(log_p.dtype).min).add_(entropies[part, None])
                factor = slope.mul_(grad_entropies[part, None])
            if grad_logprobs is not None:
                factor = factor.add_(grad_logprobs[part, None])
            total = p.mul_(factor.neg_())
            if grad_logprobs is not None:
                total.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad[part] = total.div_(ctx.temperature).to(grad.dtype)
        return grad, None, None, None


def _expectation(p: Tensor, log_p: Tensor) -> Tensor:
    """Sum of p log p over the last axis, with 0 log 0 = 0."""
    return (p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
