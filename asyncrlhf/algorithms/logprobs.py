"""Log-probabilities and entropies of tokens from logits, without keeping a second copy of the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 2**24, 2**27  # 64 and 512 MiB in float32; a GPU waits for launches of smaller ones

LOWEST = -1e4  # in place of log 0: its exponential is 0 in every float type, and it can be multiplied without overflow


class KeptSets(NamedTuple):
    """The tokens that truncated sampling allowed at each of T positions, K in total.

    Where a set is given, pi means pi renormalised on this fixed set: the distribution that was sampled from, so that
    E[grad log pi] = 0 and a ratio to the sampler is 1 at equal weights. An empty set is the whole vocabulary.
    """

    ids: Tensor  # [K] position by position
    starts: Tensor  # [T+1] int64 on the CPU: ids[starts[t]:starts[t+1]] are those of position t
    counts: Tensor  # [T] their numbers, where the ids are

    @classmethod
    def of_counts(cls, ids: Tensor, counts: Tensor) -> KeptSets:
        """``ids`` [K] on any device; ``counts`` [T] on the CPU: how many of them belong to each position."""
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0, dtype=torch.int64)))
        there = counts.long()
        if ids.is_cuda:
            there = there.pin_memory().to(ids.device, non_blocking=True)
        return cls(ids, starts, there)

    def rows(self, first: int, last: int) -> KeptSets:
        """The sets of positions ``first`` to ``last`` (exclusive)."""
        starts = self.starts[first : last + 1]
        return KeptSets(self.ids[int(starts[0]) : int(starts[-1])], starts - starts[0], self.counts[first:last])

    def at(self, positions: Tensor) -> KeptSets:
        """The sets of ``positions`` [n], in that order."""
        positions = positions.cpu()
        found = KeptSets.of_counts(self.ids, self.starts.diff()[positions])
        shift = (self.starts[positions] - found.starts[:-1]).repeat_interleave(found.starts.diff())
        return found._replace(ids=self.ids[(shift + torch.arange(len(shift))).to(self.ids.device)])

    def outside(self, vocabulary: int) -> Tensor:
        """True for each token that was not allowed: [T, V] bool."""
        outside = (self.counts > 0)[:, None].repeat(1, vocabulary)
        places = torch.arange(len(self.counts), device=self.ids.device)
        outside[places.repeat_interleave(self.counts, output_size=len(self.ids)), self.ids.long()] = False
        return outside


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 0,
    kept: KeptSets | None = None,
    vocabulary: int | None = None,
    known: list[Tensor] | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution: ([T], [T]), float32 (float64 for float64 logits).

    Args:
        logits: [T, V], any floating type; the softmax is taken in float32.
        targets: [T] int64.
        temperature: divides the logits; the same as in sampling makes the two log-probs comparable.
        chunk_tokens: rows worked on at once; 0 chooses by V. It changes memory, not results.
        kept: the sets of T positions on which the distributions are renormalised; None: the whole vocabulary.
        vocabulary: ids from this one on have no probability and get no gradient; None: all V ids have some.
        known: a list that the first call fills; another call with it has the same logits (gradient checkpointing makes
            it) and does not compute the results again.
        compiled: the work on each chunk is compiled by torch.compile, which reads the logits once or twice.

    Both results are differentiable. The backward pass recomputes the softmax chunk by chunk, so that between the two
    passes only the logits and [T] numbers are held.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} cannot divide logits; allowed: > 0.")
    apply, parts = cast(Any, _TokenLogprobs.apply), _parts(logits, chunk_tokens)
    how = _How(temperature, parts, kept, vocabulary, compiled)
    return cast(tuple[Tensor, Tensor], apply(logits, targets, how, known))


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
        found[part] = _scaled(logits[part], temperature, _outside(kept, part, logits)).softmax(-1).square_().sum(-1)
    return found


@torch.no_grad()
def kept_mass(logits: Tensor, kept: KeptSets, *, temperature: float = 1.0, chunk_tokens: int = 0) -> Tensor:
    """The probability that the whole distribution gives to each position's set: [T], detached; 1 for an empty set.

    Arguments and type as in ``token_logprobs``. A metric of how much truncation removes, not a correction.
    """
    found = _numbers(logits)
    for part in _parts(logits, chunk_tokens):
        whole = _scaled(logits[part], temperature, None).logsumexp(-1)
        among = _scaled(logits[part], temperature, _outside(kept, part, logits)).logsumexp(-1)
        found[part] = among.sub_(whole).exp_()
    return found


def _parts(logits: Tensor, chunk_tokens: int) -> list[slice]:
    """Slices of the rows, one per chunk."""
    rows = chunk_tokens or max(1, (CHUNK_ELEMENTS if logits.is_cpu else GPU_CHUNK_ELEMENTS) // max(1, logits.shape[-1]))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _numbers(logits: Tensor) -> Tensor:
    """An empty tensor of one number per row, in the type of the computation: float32, or float64 for float64 logits."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty(len(logits), dtype=dtype, device=logits.device)


def _outside(kept: KeptSets | None, part: slice, logits: Tensor) -> Tensor | None:
    """True for each token of the rows ``part`` that was not allowed; None if all were."""
    return None if kept is None else kept.rows(part.start, min(part.stop, len(logits))).outside(logits.shape[-1])


def _scaled(logits: Tensor, temperature: float, outside: Tensor | None) -> Tensor:
    """A copy of the rows, divided by the temperature; -inf outside of their sets."""
    fresh, wide = logits.dtype.itemsize < 4, logits if logits.dtype == torch.float64 else logits.float()
    scaled = wide if fresh else wide.clone() if temperature == 1 else wide / temperature
    scaled = scaled.div_(temperature) if fresh and temperature != 1 else scaled
    return scaled if outside is None else scaled.masked_fill_(outside, -torch.inf)


def _facts(
    logits: Tensor, targets: Tensor, temperature: float, outside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, entropy, logarithm of the sum of exponentials) of each row: [m] each."""
    scaled = _scaled(logits, temperature, outside)
    total = scaled.logsumexp(-1)
    log_p = scaled.sub_(total[:, None])
    chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
    p = log_p.exp()
    # 0 log 0 = 0
    return chosen, -p.mul_(log_p.clamp_(min=LOWEST)).sum(-1), total


def _gradient(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    outside: Tensor | None,
) -> Tensor:
    """Of the logits: [m, V], in their type."""
    log_p = _scaled(logits, temperature, outside).sub_(total[:, None])
    p = log_p.exp()
    # d log p_target / dz = onehot - p and dH/dz = -p (log p + H): both are p times a factor, plus the onehot.
    if grad_entropy is not None:
        # A filtered token (log p = -inf, p = 0) gets zero, not NaN.
        factor = log_p.clamp_(min=LOWEST).add_(entropy[:, None]).mul_(grad_entropy[:, None])
        factor = factor if grad_logprob is None else factor.add_(grad_logprob[:, None])
    else:
        assert grad_logprob is not None
        factor = grad_logprob[:, None]
    grad = p.mul_(factor.neg())
    if grad_logprob is not None and torch.compiler.is_compiling():  # a scatter would end the fused kernel
        here = torch.arange(grad.shape[1], device=grad.device) == targets[:, None]
        grad = grad + torch.where(here, grad_logprob[:, None], 0.0)
    elif grad_logprob is not None:
        grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None])
    return (grad if temperature == 1 else grad.div_(temperature)).to(logits.dtype)


@lru_cache(maxsize=2)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


class _How(NamedTuple):
    """The arguments of ``token_logprobs`` that are no tensors, and the chunks of rows."""

    temperature: float
    parts: list[slice]
    kept: KeptSets | None
    vocabulary: int | None
    compiled: bool


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, how: _How, known: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if known:
            logprobs, entropies, log_totals = (found.clone() for found in known)
        else:
            logprobs, entropies, log_totals = (_numbers(logits) for _ in range(3))
            work = _compiled(_facts) if how.compiled else _facts
            rows = logits[:, : how.vocabulary]
            for part in how.parts:
                found = work(rows[part], targets[part], how.temperature, _outside(how.kept, part, rows))
                logprobs[part], entropies[part], log_totals[part] = found
            if known is not None:
                known += (logprobs.clone(), entropies.clone(), log_totals)
        ctx.save_for_backward(logits, targets, log_totals, entropies)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, log_totals, entropies = ctx.saved_tensors
        how: _How = ctx.how
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 4
        # Not a slice in the caller, whose backward pass would need a second gradient of the size of the logits.
        whole = torch.empty_like(logits)
        rows, grad = logits[:, : how.vocabulary], whole[:, : how.vocabulary]
        whole[:, grad.shape[1] :] = 0
        work = _compiled(_gradient) if how.compiled else _gradient
        for part in how.parts:
            by_logprob, by_entropy = (None if x is None else x[part] for x in (grad_logprobs, grad_entropies))
            facts = (rows[part], targets[part], log_totals[part], entropies[part])
            grad[part] = work(*facts, by_logprob, by_entropy, how.temperature, _outside(how.kept, part, rows))
        return whole, None, None, None
