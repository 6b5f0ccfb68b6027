"""Log-probabilities and entropies of tokens from logits, without keeping a second copy of the logits."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**24  # a working set of 64 MiB in float32: large enough for speed, small beside the logits

LOWEST = -1e4  # in place of log 0: its exponential is 0 in every float type, and it can be multiplied without overflow


class KeptSets(NamedTuple):
    """The tokens that truncated sampling allowed at each of T positions, K in total.

    Where a set is given, pi means pi renormalised on this fixed set: the distribution that was sampled from, so that
    E[grad log pi] = 0 and a ratio to the sampler is 1 at equal weights. An empty set is the whole vocabulary.
    """

    ids: Tensor  # [K] position by position
    starts: Tensor  # [T+1] int64 on the CPU: ids[starts[t]:starts[t+1]] are those of position t

    @classmethod
    def of_counts(cls, ids: Tensor, counts: Tensor) -> KeptSets:
        """``ids`` [K] on any device; ``counts`` [T] on the CPU: how many of them belong to each position."""
        return cls(ids, torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0, dtype=torch.int64))))

    def rows(self, first: int, last: int) -> KeptSets:
        """The sets of positions ``first`` to ``last`` (exclusive)."""
        starts = self.starts[first : last + 1]
        return KeptSets(self.ids[int(starts[0]) : int(starts[-1])], starts - starts[0])

    def at(self, positions: Tensor) -> KeptSets:
        """The sets of ``positions`` [n], in that order."""
        positions = positions.cpu()
        counts = self.starts.diff()[positions]
        found = KeptSets.of_counts(self.ids, counts)
        shift = (self.starts[positions] - found.starts[:-1]).repeat_interleave(counts)
        return found._replace(ids=self.ids[(shift + torch.arange(len(shift))).to(self.ids.device)])

    def outside(self, vocabulary: int) -> Tensor:
        """True for each token that was not allowed: [T, V] bool."""
        device, counts = self.ids.device, self.starts.diff()
        outside = (counts > 0).to(device)[:, None].repeat(1, vocabulary)
        rows = torch.arange(len(counts)).repeat_interleave(counts).to(device)
        outside[rows, self.ids.long()] = False
        return outside


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 0,
    kept: KeptSets | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution: ([T], [T]), float32 (float64 for float64 logits).

    Args:
        logits: [T, V], any floating type; the softmax is taken in float32.
        targets: [T] int64.
        temperature: divides the logits; the same as in sampling makes the two log-probs comparable.
        chunk_tokens: rows worked on at once; 0 chooses by V. It changes memory, not results.
        kept: the sets of T positions on which the distributions are renormalised; None: the whole vocabulary.
        vocabulary: ids from this one on have no probability and get no gradient; None: all V ids have some.

    Both results are differentiable. The backward pass recomputes the softmax chunk by chunk, so that between the two
    passes only the logits and [T] numbers are held.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} cannot divide logits; allowed: > 0.")
    apply, parts = cast(Any, _TokenLogprobs.apply), _parts(logits, chunk_tokens)
    return cast(tuple[Tensor, Tensor], apply(logits, targets, temperature, parts, kept, vocabulary))


@torch.no_grad()
def collision_probability(
    logits: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 0, kept: KeptSets | None = None
) -> Tensor:
    """sum_v pi_v^2 of each distribution: [T], detached, float32 (float64 for float64 logits).

    Arguments as in ``token_logprobs``. It is the probability that two draws are equal.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} cannot divide logits; allowed: > 0.")
    found = _numbers(logits)
    for part in _parts(logits, chunk_tokens):
        found[part] = _scaled(logits, part, temperature, kept).softmax(-1).square_().sum(-1)
    return found


@torch.no_grad()
def kept_mass(logits: Tensor, kept: KeptSets, *, temperature: float = 1.0, chunk_tokens: int = 0) -> Tensor:
    """The probability that the whole distribution gives to each position's set: [T], detached; 1 for an empty set.

    Arguments and type as in ``token_logprobs``. A metric of how much truncation removes, not a correction.
    """
    found = _numbers(logits)
    for part in _parts(logits, chunk_tokens):
        whole = _scaled(logits, part, temperature, None).logsumexp(-1)
        found[part] = _scaled(logits, part, temperature, kept).logsumexp(-1).sub_(whole).exp_()
    return found


def _parts(logits: Tensor, chunk_tokens: int) -> list[slice]:
    """Slices of the rows, one per chunk."""
    rows = chunk_tokens or max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _numbers(logits: Tensor) -> Tensor:
    """An empty tensor of one number per row, in the type of the computation: float32, or float64 for float64 logits."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty(len(logits), dtype=dtype, device=logits.device)


def _scaled(logits: Tensor, part: slice, temperature: float, kept: KeptSets | None) -> Tensor:
    """A copy of the rows ``part``, divided by the temperature; -inf outside of their sets."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits[part].to(dtype) / temperature
    if kept is None:
        return scaled
    return scaled.masked_fill_(kept.rows(part.start, min(part.stop, len(logits))).outside(logits.shape[-1]), -torch.inf)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        parts: list[slice],
        kept: KeptSets | None,
        vocabulary: int | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = _numbers(logits)
        entropies = torch.empty_like(logprobs)
        log_totals = torch.empty_like(logprobs)
        known = logits[:, :vocabulary]
        for part in parts:
            scaled = _scaled(known, part, temperature, kept)
            log_totals[part] = scaled.logsumexp(-1)
            log_p = scaled.sub_(log_totals[part, None])
            logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            entropies[part] = -_expectation(log_p.exp(), log_p)
        ctx.save_for_backward(logits, targets, log_totals, entropies)
        ctx.temperature, ctx.parts, ctx.kept, ctx.vocabulary = temperature, parts, kept, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, log_totals, entropies = ctx.saved_tensors
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 6
        # Not a slice in the caller, whose backward pass would need a second gradient of the size of the logits.
        whole = torch.empty_like(logits)
        known, grad = logits[:, : ctx.vocabulary], whole[:, : ctx.vocabulary]
        whole[:, grad.shape[1] :] = 0
        for part in ctx.parts:
            log_p = _scaled(known, part, ctx.temperature, ctx.kept).sub_(log_totals[part, None])
            p = log_p.exp()
            # d log p_target / dz = onehot - p and dH/dz = -p (log p + H): both are p times a factor, plus the onehot.
            factor = torch.zeros_like(log_totals[part, None])
            if grad_entropies is not None:
                # A filtered token (log p = -inf, p = 0) gets zero, not NaN.
                slope = log_p.clamp_(min=LOWEST).add_(entropies[part, None])
                factor = slope.mul_(grad_entropies[part, None])
            if grad_logprobs is not None:
                factor = factor.add_(grad_logprobs[part, None])
            total = p.mul_(factor.neg_())
            if grad_logprobs is not None:
                total.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad[part] = total.div_(ctx.temperature).to(grad.dtype)
        return whole, None, None, None, None, None


def _expectation(p: Tensor, log_p: Tensor) -> Tensor:
    """Sum of p log p over the last axis, with 0 log 0 = 0."""
    return (p * log_p.clamp(min=LOWEST)).sum(-1)
