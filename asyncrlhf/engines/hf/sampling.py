"""Sampling: counter-based uniforms, and one draw per row from logits with temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.models.copies import all_to_device, to_host

UIntArray = NDArray[np.uint64]
DoubleArray = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
MAX_KEPT = 1024  # most tokens that truncated sampling keeps: part of the sampler, so that kept sets can be reported
_CDF_BLOCK = 256


class Draws(NamedTuple):
    """One token for each of n rows, and the kept sets of truncated rows: K tokens in total. On the host."""

    tokens: torch.Tensor  # [n] int64
    logprobs: torch.Tensor  # [n] float32, of the distribution that was sampled
    kept_ids: torch.Tensor  # [K] int64, row by row
    kept_counts: torch.Tensor  # [n] int64; 0: the whole vocabulary


def _mix(x: UIntArray) -> UIntArray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def seed_state(seed: int) -> np.uint64:
    """The start of a request's stream; mixed, so that the streams of neighbouring seeds do not overlap."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN)[0]


def uniforms(states: UIntArray, counters: NDArray[np.int64]) -> DoubleArray:
    """Draw ``counters[i]`` of the stream ``states[i]``: [n] numbers inside (0, 1), which depend only on these two."""
    bits = _mix(states + _GOLDEN * (counters.astype(np.uint64) + np.uint64(1)))
    # 48 bits: u * total stays below total in double precision, so that a draw never exceeds the range.
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _keep(
    logits: torch.Tensor, filters: Mapping[str, torch.Tensor], most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of m truncated rows, most likely first: ids [m, W], logits [m, W], and which are kept [m, W].

    ``filters``: columns [m, 1]; ``k`` is at most ``most``, and without ``top_p`` no row has one. Every filter keeps the
    first few tokens in the order of their logits, so no others are needed.
    """
    values, ids = logits.topk(most, dim=-1)
    kept = torch.arange(most, device=logits.device) < filters["k"]
    weights = (values - values[:, :1]).double().exp()
    if "top_p" in filters:
        whole = (logits - values[:, :1]).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
        among = (weights * kept).sum(dim=-1, keepdim=True)
        total = torch.where(filters["has_k"], among, whole)
        limit = filters["top_p"]
        kept &= (weights.cumsum(dim=-1) - weights < limit * total) | (limit >= 1.0)
    kept &= weights >= filters["min_p"]
    kept[:, :1].fill_(True)
    return ids, values, kept


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token [n, 1] at which the running sum of ``weights`` [n, V] exceeds ``uniform`` [n, 1] times their total.

    In a large vocabulary it finds the block first, then the token in it: running sums over all tokens in double
    precision would take longer than a small model's output layer.
    """
    vocabulary = weights.shape[-1]
    if vocabulary <= 4 * _CDF_BLOCK:
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        # Not a number is found behind the last token, where a GPU would end its whole context.
        return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp_(max=vocabulary - 1)
    if over := -vocabulary % _CDF_BLOCK:
        weights = torch.nn.functional.pad(weights, (0, over))
    blocks = weights.view(len(weights), -1, _CDF_BLOCK)
    mass = blocks.sum(dim=-1).double()
    cdf = mass.cumsum(dim=-1)
    target = uniform * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=blocks.shape[1] - 1)
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
    min_p: DoubleArray,
) -> Draws:
    """One token per row by the inverse CDF of the distribution that the row's settings make of ``logits`` [n, V].

    The logits are divided by ``temperature``; ``top_k`` keeps the k largest; ``top_p`` keeps, of these, the largest
    until their sum of probabilities reaches it; ``min_p`` drops tokens with less than that fraction of the largest
    probability. At least one and at most ``MAX_KEPT`` tokens are kept in a truncated row; of tokens that tie at the
    limit as many as fit. The kept tokens are renormalised. ``top_k=0``, ``top_p=1`` and ``min_p=0`` are off. The
    settings and ``uniform`` are [n]. A greedy row (``temperature=0``) takes the argmax, with its log-prob at
    temperature 1 and no filter: a point mass has no useful one. Raises AsyncRLHFError for logits that are not
    finite. A device gets all settings in one copy, and the host waits for it once, at the end.
    """
    logits, plain = logits.float(), logits
    sampled = temperature > 0
    # Rows in which a filter is on; a greedy row has none.
    truncated = sampled & (((top_k > 0) & (top_k < logits.shape[-1])) | (top_p < 1) | (min_p > 0))
    rows = np.flatnonzero(truncated)
    given: dict[str, NDArray[Any]] = {"uniform": uniform}
    if np.any(sampled & (temperature != 1.0)):
        given["divisor"] = np.where(sampled, temperature, 1.0).astype(np.float32)
    if not sampled.all():
        given["sampled"] = sampled
    if len(rows):
        most = min(MAX_KEPT, logits.shape[-1])
        k = np.where(top_k > 0, np.minimum(top_k, most), most)[rows]
        given |= {"rows": rows, "draw": uniform[rows], "k": k, "min_p": min_p[rows]}
        if (top_p[rows] < 1.0).any():
            given |= {"top_p": top_p[rows], "has_k": top_k[rows] > 0}
    columns = [torch.from_numpy(np.ascontiguousarray(array[:, None])) for array in given.values()]
    sent = dict(zip(given, all_to_device(columns, logits.device), strict=True))
    if "divisor" in sent:
        logits = logits / sent["divisor"]
    if len(rows) == len(logits):
        return _fetched(*_draw_truncated(logits, sent, int(k.max())), rows)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _inverse_cdf(logprobs.exp(), sent["uniform"]).clamp(max=logits.shape[-1] - 1)
    if "sampled" in sent:
        tokens = torch.where(sent["sampled"], tokens, plain.argmax(dim=-1, keepdim=True))
    found = logprobs.gather(1, tokens)
    if not len(rows):
        return _fetched(tokens, found)
    where = sent["rows"][:, 0]
    part_tokens, part_found, ids, kept = _draw_truncated(logits[where], sent, int(k.max()))
    tokens, found = tokens.index_copy(0, where, part_tokens), found.index_copy(0, where, part_found)
    return _fetched(tokens, found, ids, kept, rows)


def penalise_repetition(logits: torch.Tensor, texts: Sequence[NDArray[np.int64]], penalty: DoubleArray) -> torch.Tensor:
    """``logits`` [n, V] with those of the tokens in each row's text reduced, as in CTRL (1909.05858, section 4.1):
    positive ones divided by the row's ``penalty`` [n], negative ones multiplied."""
    rows = np.flatnonzero(penalty != 1.0)
    seen = [np.unique(texts[row]) for row in rows]
    counts = [len(tokens) for tokens in seen]
    given = (np.repeat(rows, counts), np.concatenate(seen), np.repeat(penalty[rows].astype(np.float32), counts))
    where, tokens, factor = all_to_device([torch.from_numpy(array) for array in given], logits.device)
    logits = logits.float()
    found = logits[where, tokens]
    return logits.index_put((where, tokens), torch.where(found > 0, found / factor, found * factor))


def _draw_truncated(
    logits: torch.Tensor, filters: Mapping[str, torch.Tensor], most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [m, 1] with their log-probs [m, 1], and the candidates' ids [m, W] with which of them are kept."""
    ids, values, kept = _keep(logits, filters, most)
    logprobs = values.masked_fill(~kept, float("-inf")).log_softmax(dim=-1)
    place = _inverse_cdf(logprobs.exp(), filters["draw"])
    return ids.gather(1, place), logprobs.gather(1, place), ids, kept


def _fetched(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    ids: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    rows: NDArray[np.int64] | None = None,
) -> Draws:
    """The draws of n rows, of which ``rows`` [m] are truncated, by one copy to the host. Ids pass as float32, which is
    exact for vocabularies below 2^24."""
    tokens, logprobs, *sets = to_host([x for x in (tokens, logprobs, ids, kept) if x is not None])
    if not np.isfinite(logprobs.numpy()).all():
        raise AsyncRLHFError(
            "The model's logits are not finite, so that no token can be sampled: its weights are broken."
        )
    counts = np.zeros(len(tokens), np.int64)
    if rows is not None:
        counts[rows] = sets[1].sum(dim=-1).numpy()
    kept_ids = tokens.new_empty(0) if rows is None else sets[0][sets[1]]
    return Draws(tokens[:, 0], logprobs[:, 0], kept_ids, torch.from_numpy(counts))
