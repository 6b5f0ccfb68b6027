"""Attention over packed sequences whose tokens are on several ranks: keys and values travel around a ring.

The packed tokens are cut into twice as many stretches as there are ranks, and rank r has the stretches r from the front
and r from the back: a late token has more keys than an early one, so this balances the ranks' work (the zigzag of Zhu's
ring-flash-attention). Sequences are cut where a stretch ends; a shared prompt stays where it was packed.

A rank keeps its queries. With each hop it gets the keys and values of one rank further back, while it works on those
that came before; the partial results are merged by their log-sum-exps (Liu et al., 2310.01889). In the backward pass
the gradients of keys and values travel with them and return after the last hop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrlhf.learner.attention.tiles import Scoring
from asyncrlhf.learner.attention.varlen import (
    attention_op,
    attention_op_backward,
    flash_op,
    flash_op_backward,
    grouped_heads,
    kernel_type,
    varlen_takes,
)
from asyncrlhf.learner.ranks import Peers
from asyncrlhf.types import IntArray

Stretch = tuple[int, int, int]  # first packed token, the one after the last, and the offset to the index on the rank


@dataclass(frozen=True)
class Rectangles:
    """R runs of queries of one rank, each of which sees one run of keys of another: all of them, or, where ``causal``,
    those up to itself."""

    queries: IntArray  # [R, 2] the first token's index on its rank, and the number of tokens
    keys: IntArray  # [R, 2]
    causal: bool = False

    def slices(self) -> Iterator[tuple[slice, slice]]:
        for (first, count), (key, keys) in zip(self.queries.tolist(), self.keys.tolist(), strict=True):
            yield slice(first, first + count), slice(key, key + keys)

    def rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token of the queries and of the keys, run by run."""
        queries, keys = (torch.from_numpy(_rows(runs)).to(device) for runs in (self.queries, self.keys))
        return queries, keys


@dataclass(frozen=True)
class RingPlan:
    """One rank's view of the others."""

    rank: int
    rows: IntArray  # [T] its packed tokens
    sizes: tuple[int, ...]  # tokens of each rank
    spans: torch.Tensor  # [n, 4] its own part of each sequence, as ``varlen.plan_calls`` takes it
    blocks: tuple[tuple[Rectangles, ...], ...]  # each rank's keys that its queries see, at most once per query
    positions: tuple[torch.Tensor, ...]  # [T] of each rank's tokens in their sequences
    longest: int  # tokens of the longest sequence


def plan_ring(spans: IntArray, positions: IntArray, rank: int, ranks: int) -> RingPlan:
    """``spans`` [N, 4] of a packed batch as ``varlen.plan_calls`` takes them, ``positions`` [K] of its tokens."""
    borders = np.arange(2 * ranks + 1) * len(positions) // (2 * ranks)
    stretches = [_stretches(borders, place, ranks) for place in range(ranks)]
    rows = [np.concatenate([np.arange(first, end) for first, end, _ in both]) for both in stretches]
    own, prompts = spans[:, :2], spans[:, 2:]
    mine = _within(own, stretches[rank])
    local = np.concatenate([mine, _within(prompts, stretches[rank])], axis=1)[mine[:, 1] > 0]
    blocks: list[tuple[Rectangles, ...]] = []
    for source in range(ranks):
        if source == rank:
            parts = [_rectangles(mine, mine, causal=True), _rectangles(mine, _within(prompts, stretches[rank]))]
        else:
            # It sees the front stretch of an earlier rank; its back stretch alone sees those of a later rank.
            queries = mine if source < rank else _within(own, stretches[rank][1:])
            seen = stretches[source][:1] if source < rank else stretches[source]
            parts = [_rectangles(queries, _within(keys, seen)) for keys in (own, prompts)]
        blocks.append(tuple(part for part in parts if len(part.queries)))
    return RingPlan(
        rank=rank,
        rows=rows[rank],
        sizes=tuple(len(part) for part in rows),
        spans=torch.from_numpy(np.ascontiguousarray(local)),
        blocks=tuple(blocks),
        positions=tuple(torch.from_numpy(positions[part]) for part in rows),
        longest=int(positions.max()) + 1,
    )


def _stretches(borders: IntArray, rank: int, ranks: int) -> tuple[Stretch, Stretch]:
    front, back = rank, 2 * ranks - 1 - rank
    first, end, late = int(borders[front]), int(borders[front + 1]), int(borders[back])
    return (first, end, -first), (late, int(borders[back + 1]), end - first - late)


def _within(runs: IntArray, stretches: tuple[Stretch, ...]) -> IntArray:
    """[N, 2]: the part of ``runs`` [N, 2] of packed tokens inside the stretches, as indices on their rank; zeros if
    there is none.

    A run with a part in both stretches is one run there too, because it contains everything between them.
    """
    found = np.zeros_like(runs)
    for first, end, shift in stretches:
        low = np.maximum(runs[:, 0], first)
        count = np.maximum(np.minimum(runs.sum(axis=1), end) - low, 0)
        found[:, 0] = np.where((found[:, 1] == 0) & (count > 0), low + shift, found[:, 0])
        found[:, 1] += count
    return found


def _rectangles(queries: IntArray, keys: IntArray, causal: bool = False) -> Rectangles:
    """Those with a query and a key; neighbouring queries that see the same keys, as siblings do, are one run."""
    there = (queries[:, 1] > 0) & (keys[:, 1] > 0)
    queries, keys = queries[there], keys[there]
    new = np.ones(len(queries), dtype=np.bool_)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1) | (queries[1:, 0] != queries[:-1].sum(axis=1))
    starts = np.flatnonzero(new)
    counts = np.add.reduceat(queries[:, 1], starts) if len(starts) else starts
    return Rectangles(np.stack([queries[starts, 0], counts], axis=1), keys[starts], causal)


def _rows(runs: IntArray) -> IntArray:
    firsts, counts = runs.T
    return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


Rows = slice | torch.Tensor  # of a packed tensor


@dataclass
class _Arriving:
    """A tensor that is being received. ``sent`` is being sent at the same time and must not change until it has
    left."""

    room: torch.Tensor
    sent: torch.Tensor
    works: list[dist.Work]

    def get(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.room


def _pass_on(tensor: torch.Tensor, tokens: int, peers: Peers) -> _Arriving:
    """Send ``tensor`` [heads, T, D] to the next rank, and get one of ``tokens`` from the rank before."""
    sent = tensor.contiguous()
    room = sent.new_empty((len(sent), tokens, sent.shape[2]))
    operations = []
    if sent.shape[1]:
        operations.append(dist.P2POp(dist.isend, sent, group=peers.group, group_peer=(peers.rank + 1) % peers.ranks))
    if tokens:
        operations.append(dist.P2POp(dist.irecv, room, group=peers.group, group_peer=(peers.rank - 1) % peers.ranks))
    return _Arriving(room, sent, dist.batch_isend_irecv(operations) if operations else [])


class _Kernel(ABC):
    """Attention of one block: the queries of a rank and the keys of another. Tensors are [heads, T, D]."""

    def __init__(self, plan: RingPlan, scoring: Scoring) -> None:
        """The sinks of ``scoring`` are no part of a block."""
        self.plan, self.scale, self.window, self.softcap = plan, scoring.scale, scoring.window, scoring.softcap

    def type(self, value: torch.Tensor) -> torch.dtype:
        """The dtype of queries, keys and values."""
        return value.dtype

    def first(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exps [heads, T]) of the rank's queries and its own keys."""
        kind = torch.promote_types(v.dtype, torch.float32)
        out = v.new_zeros((*q.shape[:2], v.shape[2]), dtype=kind)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=kind, device=v.device)
        self.add(self.plan.rank, q, k, v, out, lse)
        return out, lse

    def add(
        self, source: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Merge the attention to rank ``source``'s keys into that to the earlier ones, in place."""
        for part in self.plan.blocks[source]:
            for mine, found, sums in self.partial(source, part, q, k, v):
                before = lse[:, mine]
                both = torch.logaddexp(before, sums)
                kept, added = (before - both).exp_()[..., None], (sums - both).exp_()[..., None]
                out[:, mine] = out[:, mine] * kept + found * added
                lse[:, mine] = both

    @abstractmethod
    def partial(
        self, source: int, part: Rectangles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        """(rows of the queries, output, log-sum-exps) of these rectangles alone."""

    @abstractmethod
    def gradients(
        self, source: int, saved: tuple[torch.Tensor, ...], k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of rank ``source``'s keys and values; that of the queries is added to ``dq``. ``saved``: the
        gradient of the output, queries, output and log-sum-exps, the last two over all keys that each query saw."""


class _FlashCalls(_Kernel):
    """On CPUs: one flash call per rectangle; the rank's own keys as without a ring."""

    def first(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention_op(q[None], k[None], v[None], self.plan.spans, self.scale)
        return out[0].transpose(0, 1).to(lse.dtype), lse

    def partial(
        self, source: int, part: Rectangles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        for mine, theirs in part.slices():
            kind = kernel_type(v, theirs.stop - theirs.start)
            given = (x[None].to(kind) for x in (q[:, mine], k[:, theirs], v[:, theirs]))
            found, sums = flash_op(*given, 0.0, False, scale=self.scale)
            yield mine, found[0], sums[0]

    def gradients(
        self, source: int, saved: tuple[torch.Tensor, ...], k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dout, q, out, lse = saved
        if source == self.plan.rank:
            grad, result = (x.transpose(0, 1)[None].to(v.dtype) for x in (dout, out))
            found = attention_op_backward(grad, q[None], k[None], v[None], result, lse, self.plan.spans, self.scale)
            dq += found[0][0]
            return found[1][0].to(dq.dtype), found[2][0].to(dq.dtype)
        dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
        for part in self.plan.blocks[source]:
            for mine, theirs in part.slices():
                kind = kernel_type(v, theirs.stop - theirs.start)
                given = (dout[:, mine], q[:, mine], k[:, theirs], v[:, theirs], out[:, mine])
                laid = (x[None].to(kind) for x in given)
                found = flash_op_backward(*laid, lse[None, :, mine], 0.0, False, scale=self.scale)
                for target, where, gradient in zip((dq, dk, dv), (mine, theirs, theirs), found, strict=True):
                    target[:, where] += gradient[0]
        return dk, dv


class _Varlen(_Kernel):
    """On GPUs in half precision: torch's varlen kernel, one call for the runs of a block that see their sequence's own
    tokens, one for those that see a prompt's."""

    def _bounds(self, part: Rectangles, device: torch.device) -> tuple[Any, ...]:
        counts = [torch.from_numpy(runs[:, 1]).cumsum(0).to(torch.int32) for runs in (part.queries, part.keys)]
        ends = (torch.cat([count.new_zeros(1), count]).to(device) for count in counts)
        return (*ends, int(part.queries[:, 1].max()), int(part.keys[:, 1].max()))

    def partial(
        self, source: int, part: Rectangles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        from torch.nn.attention import varlen

        mine, theirs = part.rows(q.device)
        queries, keys, values = (
            x.transpose(0, 1).index_select(0, rows) for x, rows in ((q, mine), (k, theirs), (v, theirs))
        )
        keys, values, more = grouped_heads(queries, keys, values)
        found: Any = varlen.varlen_attn(
            queries,
            keys,
            values,
            *self._bounds(part, q.device),
            return_aux=varlen.AuxRequest(lse=True),
            scale=self.scale,
            window_size=(-1, 0) if part.causal else (-1, -1),
            **more,
        )
        yield mine, found[0].transpose(0, 1), found[1]

    def gradients(
        self, source: int, saved: tuple[torch.Tensor, ...], k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dout, q, out, lse = saved
        dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
        for part in self.plan.blocks[source]:
            mine, theirs = part.rows(q.device)
            chosen = ((dout, mine), (q, mine), (k, theirs), (v, theirs), (out, mine))
            grad, queries, keys, values, result = (
                x.transpose(0, 1).index_select(0, rows).to(v.dtype) for x, rows in chosen
            )
            keys, values, _ = grouped_heads(queries, keys, values)
            found = torch.ops.torch_attn._varlen_attn_backward(
                grad,
                queries,
                keys,
                values,
                result,
                lse.index_select(1, mine).float(),
                *self._bounds(part, q.device),
                part.causal,
                torch.zeros(2, dtype=torch.uint64, device=q.device),  # of a dropout that is off
                self.scale,
                [-1, 0] if part.causal else [-1, -1],
            )
            for target, rows, gradient in zip((dq, dk, dv), (mine, theirs, theirs), found, strict=True):
                shared = gradient.transpose(0, 1).to(target.dtype).unflatten(0, (len(target), -1)).sum(1)
                target.index_add_(1, rows, shared)
        return dk, dv


class _Written(_Kernel):
    """An explicit softmax, one rectangle at a time: for sliding windows, soft caps, heads whose values have another
    size, and on GPUs what torch's varlen kernel does not take."""

    def type(self, value: torch.Tensor) -> torch.dtype:
        return torch.promote_types(value.dtype, torch.float32)

    def _scores(
        self, source: int, q: torch.Tensor, k: torch.Tensor, mine: slice, theirs: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(scores, keys, slope of the cap), the keys repeated for each query head."""
        keys = k[:, theirs].repeat_interleave(len(q) // len(k), 0)
        scores = (q[:, mine] @ keys.transpose(1, 2)) * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1 - bent.square()
        positions = self.plan.positions
        distance = positions[self.plan.rank][mine, None] - positions[source][None, theirs]
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        return scores.masked_fill(hidden.to(q.device), -torch.inf), keys, slope

    def partial(
        self, source: int, part: Rectangles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[Rows, torch.Tensor, torch.Tensor]]:
        for mine, theirs in part.slices():
            scores, _, _ = self._scores(source, q, k, mine, theirs)
            sums = scores.logsumexp(-1)
            weights = (scores - sums.masked_fill(sums.isinf(), 0.0)[..., None]).exp()
            yield mine, weights @ v[:, theirs].repeat_interleave(len(q) // len(v), 0), sums

    def gradients(
        self, source: int, saved: tuple[torch.Tensor, ...], k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dout, q, out, lse = saved
        dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
        group = len(q) // len(k)
        for part in self.plan.blocks[source]:
            for mine, theirs in part.slices():
                scores, keys, slope = self._scores(source, q, k, mine, theirs)
                weights = (scores - lse[:, mine, None]).exp()
                values = v[:, theirs].repeat_interleave(group, 0)
                inner = dout[:, mine] @ values.transpose(1, 2) - (dout[:, mine] * out[:, mine]).sum(-1, keepdim=True)
                slopes = weights * inner * self.scale
                slopes = slopes if slope is None else slopes * slope
                dq[:, mine] += slopes @ keys
                dk[:, theirs] += (slopes.transpose(1, 2) @ q[:, mine]).unflatten(0, (len(k), group)).sum(1)
                dv[:, theirs] += (weights.transpose(1, 2) @ dout[:, mine]).unflatten(0, (len(v), group)).sum(1)
        return dk, dv


def _kernel(plan: RingPlan, query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> _Kernel:
    if scoring.window is not None and scoring.window > plan.longest:
        scoring = scoring._replace(window=None)
    alike = scoring.window is None and scoring.softcap is None and query.shape[-1] == value.shape[-1]
    if alike and query.device.type == "cpu":
        return _FlashCalls(plan, scoring)
    if alike and varlen_takes(query, value):
        return _Varlen(plan, scoring)
    return _Written(plan, scoring)


class _RingAttention(torch.autograd.Function):
    """All ranks of the ring call it together, each with its own tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        kernel: _Kernel,
        peers: Peers,
    ) -> torch.Tensor:
        """[1, heads, T, D] as :meth:`Layout.attend` has them -> [1, T, heads, D]."""
        kind, here, sizes = kernel.type(value), peers.rank, kernel.plan.sizes
        q, kv = query[0].to(kind), torch.cat([key[0].to(kind), value[0].to(kind)], -1)
        split = (key.shape[-1], value.shape[-1])
        arriving = _pass_on(kv, sizes[here - 1], peers)
        out, lse = kernel.first(q, *kv.split(split, -1))
        for hop in range(1, peers.ranks):
            came = arriving.get()
            if hop + 1 < peers.ranks:
                arriving = _pass_on(came, sizes[here - hop - 1], peers)
            keys, values = came.split(split, -1)
            kernel.add((here - hop) % peers.ranks, q, keys, values, out, lse)
        if sinks is not None:  # one more key, whose value is zero
            both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * (lse - both).exp()[..., None], both
        result = out.to(value.dtype)
        ctx.kernel, ctx.peers, ctx.split, ctx.types = kernel, peers, split, [x.dtype for x in (query, key, value)]
        ctx.save_for_backward(q, kv, result, lse, sinks)
        return result.transpose(0, 1)[None].contiguous()  # some models take a view of it

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        kernel, peers, split, here, sizes = ctx.kernel, ctx.peers, ctx.split, ctx.peers.rank, ctx.kernel.plan.sizes
        saved = (grads[0][0].transpose(0, 1).to(kv.dtype), q, out.to(kv.dtype), lse)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        coming, home = None, None  # keys and values of the next block, and the gradients of this one
        for hop in range(peers.ranks):
            kv = kv if coming is None else coming.get()
            if hop + 1 < peers.ranks:
                coming = _pass_on(kv, sizes[here - hop - 1], peers)
            found = torch.cat(kernel.gradients((here - hop) % peers.ranks, saved, *kv.split(split, -1), dq), -1)
            found = found if home is None else found.add_(home.get())
            home = _pass_on(found, sizes[(here - hop - 1) % peers.ranks], peers)
        assert home is not None
        wanted = (dq, *home.get().split(split, -1))
        for_sinks = None
        if sinks is not None:
            weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
            for_sinks = -(weights * (saved[0] * saved[2]).sum(-1)).sum(1).to(sinks.dtype)
        return (*(x[None].to(kind) for x, kind in zip(wanted, ctx.types, strict=True)), for_sinks, None, None)


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here, a second of each process
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: RingPlan, peers: Peers, scoring: Scoring
) -> torch.Tensor:
    """Causal attention inside each sequence of a batch of which this rank has the tokens ``plan.rows``.

    query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D]. Each rank's gradient of the sinks is
    that of its own queries. All ranks of ``peers`` call it together, and its backward pass, too.
    """
    with torch.autocast(query.device.type, enabled=False):  # a softmax that is written out needs float32 scores
        kernel = _kernel(plan, query, value, scoring)
        return _RingAttention.apply(query, key, value, scoring.sinks, kernel, peers)
