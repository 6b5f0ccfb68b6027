"""The hf engine's slots: the request of each row, with its tokens, log-probs and versions; and the plans of its forward
passes: their tokens, and the places of their keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrlhf.engines.hf.kept_group import KeptGroup
from asyncrlhf.engines.hf.kv_cache import ForwardPlan, KVCache
from asyncrlhf.engines.hf.layer_group import Again, GroupPlan, LayerGroup
from asyncrlhf.engines.hf.route_table import RouteTable
from asyncrlhf.engines.hf.sampling import Draws, seed_state
from asyncrlhf.engines.hf.slot_attention import LENGTH_MULTIPLE, PrefillBucket, make_buckets
from asyncrlhf.types import FinishReason, GenerationRequest, IdArray, IntArray, Rollout

# Fields of one row beside its tokens: their number, including the prompt; its latest end; whether the KV cache holds
# all of them except the last, which the next decode iteration feeds; its stream of draws; its sampling settings; the
# tokens whose keys and values it has lost, equally many in each layer and head.
ROW = np.dtype([
    ("length", np.int64), ("prompt_length", np.int64), ("limit", np.int64), ("ready", np.bool_), ("state", np.uint64),
    ("temperature", np.float64), ("top_p", np.float64), ("top_k", np.int64), ("min_p", np.float64),
    ("repetition_penalty", np.float64), ("evicted", np.int64),
], align=True)  # fmt: skip


class SlotTable:
    """Arrays over ``slots`` rows; the active rows are ``0 .. count - 1``. All on the host, vectorised over rows."""

    def __init__(self, slots: int, routes: RouteTable | None = None) -> None:
        """``routes``: where the experts of each token are kept, if the engine reports them."""
        self.slots, self.routes = slots, routes
        self.count = 0
        self.requests: list[GenerationRequest | None] = [None] * slots
        self.tokens = np.zeros((slots, 0), np.int64)
        self.logprobs = np.zeros((slots, 0), np.float32)
        self.versions = np.zeros((slots, 0), np.int64)
        self.stops = np.zeros((slots, 0), np.int64)
        self.rows = np.zeros(slots, ROW)
        self.length, self.prompt_length = self.rows["length"], self.rows["prompt_length"]  # views, as is the next
        self.ready = self.rows["ready"]
        self.kept: list[list[IdArray]] = [[] for _ in range(slots)]  # of each response token, where truncated

    def occupy(self, row: int, request: GenerationRequest, ready: bool) -> None:
        prompt, sampling = request.prompt_ids, request.sampling
        limit = len(prompt) + sampling.max_completion_length
        self._widen(limit, len(sampling.stop_token_ids))
        self.requests[row] = request
        self.tokens[row, : len(prompt)] = prompt
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.rows[row] = (
            len(prompt), len(prompt), limit, ready, seed_state(request.seed),
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty, 0,
        )  # fmt: skip
        self.kept[row] = []
        if self.routes is not None:
            self.routes.occupy(row, limit)

    def _widen(self, length: int, stops: int) -> None:
        if length > self.tokens.shape[1]:
            extra = ((0, 0), (0, length - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, extra)
            self.logprobs = np.pad(self.logprobs, extra)
            self.versions = np.pad(self.versions, extra)
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=-1)

    def due(self, budget: int) -> IntArray:
        """Rows whose responses have ``budget`` tokens in the cache."""
        facts = self.rows[: self.count]
        return np.flatnonzero(facts["length"] - 1 - facts["prompt_length"] - facts["evicted"] >= budget)

    def move(self, source: int, target: int) -> None:
        for array in (self.tokens, self.logprobs, self.versions, self.stops, self.rows):
            array[target] = array[source]
        self.kept[target] = self.kept[source]
        if self.routes is not None:
            self.routes.copy(source, target)
        self.requests[target], self.requests[source] = self.requests[source], None

    def append(self, rows: IntArray, draws: Draws, version: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Append a sampled token to each of ``rows``; returns the rows that ended, and whether by a stop token."""
        place, tokens = self.length[rows], draws.tokens.numpy()
        self.tokens[rows, place] = tokens
        self.logprobs[rows, place] = draws.logprobs.numpy()
        self.versions[rows, place] = version
        self.length[rows] = place + 1
        if len(draws.kept_ids):
            ids, ends = draws.kept_ids.numpy().astype(np.int32), draws.kept_counts.cumsum(0).tolist()
            for row, start, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
                if end > start:
                    self.kept[row].append(ids[start:end])
        stopped = (tokens[:, None] == self.stops[rows]).any(axis=1)
        ended = np.flatnonzero(stopped | (place + 1 >= self.rows["limit"][rows]))
        return rows[ended], stopped[ended]

    def sampled(self) -> Iterator[tuple[int, IntArray]]:
        """Rollout id and response tokens so far, a view, of each request."""
        for request, row, start, stop in zip(
            self.requests, self.tokens, self.prompt_length.tolist(), self.length.tolist(), strict=True
        ):
            if request is not None:
                yield request.rollout_id, row[start:stop]

    def take(self, row: int, reason: FinishReason) -> Rollout:
        """Remove a finished row and return its result."""
        request = self.requests[row]
        assert request is not None
        self.requests[row] = None
        part = slice(int(self.prompt_length[row]), int(self.length[row]))
        kept, self.kept[row] = self.kept[row], []
        return Rollout(
            request.rollout_id,
            request.group_id,
            request.prompt,
            response_ids=self.tokens[row, part].copy(),
            behavior_logprobs=self.logprobs[row, part].copy(),
            policy_versions=self.versions[row, part].copy(),
            finish_reason=reason,
            kept_ids=np.concatenate(kept) if kept else None,
            kept_counts=np.array([len(ids) for ids in kept], np.int32) if kept else None,
            routed_experts=None if self.routes is None else self.routes.take(row, part.stop - 1),
        )


Prefill = tuple[IntArray, list[int]]  # a sequence, and the rows that share it
PREFILL_TOKENS = 8192  # tokens of one forward pass: bounds its memory if many long sequences need a prefill at once


def choose_prefills(table: SlotTable) -> list[Prefill]:
    """Sequences to prefill now, each with the rows that share it, shortest first.

    The decode iteration processes a row's last token. Rows with equal tokens (siblings of one group) share one prefill,
    unless they have lost some; those that have come last. Rows over the budget wait for the next step.
    """
    shared: dict[tuple[int, bytes], Prefill] = {}
    tokens = 0
    for row in np.flatnonzero(~table.ready[: table.count]):
        sequence = table.tokens[row, : table.length[row] - 1]
        if not len(sequence):
            table.ready[row] = True
            continue
        evicted = bool(table.rows["evicted"][row])
        key = (int(row) if evicted else -1, sequence.tobytes())
        found = shared.get(key)
        if found is not None:
            found[1].append(int(row))
        elif not shared or tokens + len(sequence) <= PREFILL_TOKENS:
            shared[key] = (sequence, [int(row)])
            tokens += len(sequence)
    return sorted(shared.values(), key=lambda item: (_is_again(table, item), len(item[0])))


def _is_again(table: SlotTable, prefill: Prefill) -> bool:
    """Whether the row, which is alone, has lost tokens."""
    return bool(table.rows["evicted"][prefill[1][0]])


def plan_step(table: SlotTable, prefills: Sequence[Prefill], cache: KVCache) -> ForwardPlan:
    """One decode iteration of all active rows together with ``prefills``, on the host."""
    n = table.count
    rows = np.arange(n)
    last = table.length[:n] - 1
    ids, positions = [table.tokens[rows, last]], [last]
    source, target, place = [rows], [rows], [last]
    packed = n
    again: list[Again] = []
    plain = [len(prefill[0]) for prefill in prefills if not _is_again(table, prefill)]
    buckets = list(make_buckets(plain, n))
    for prefill in prefills:
        sequence, sharers = prefill
        size = len(sequence)
        if _is_again(table, prefill):
            buckets.append(PrefillBucket(packed, packed + size, 1, None, None, sharers[0]))
            again.append(Again(sharers[0], packed, size, int(table.rows["evicted"][sharers[0]])))
        ids.append(sequence)
        positions.append(np.arange(size))
        source.append(np.tile(np.arange(packed, packed + size), len(sharers)))
        target.append(np.repeat(sharers, size))
        place.append(np.tile(np.arange(size), len(sharers)))
        packed += size
    writes = _joined(source), _joined(target), _joined(place)
    return ForwardPlan(
        input_ids=_tensor(_joined(ids)),
        positions=_tensor(_joined(positions)),
        num_decode=n,
        num_logits=n,
        longest=int(last.max()),
        buckets=tuple(buckets),
        groups=tuple(
            _plan_kept(group, table, prefills, last, writes, again)
            if isinstance(group, KeptGroup)
            else _plan_group(group, last, writes, packed)
            for group in cache.groups
        ),
    )


def _plan_kept(
    group: KeptGroup,
    table: SlotTable,
    prefills: Sequence[Prefill],
    last: IntArray,
    writes: tuple[IntArray, IntArray, IntArray],
    again: list[Again],
) -> GroupPlan:
    """As :func:`_plan_group`, where rows may have lost tokens. The prefills of those write in ``again``."""
    source, target, position = writes
    evicted, decodes = table.rows["evicted"], source < len(last)
    stay = decodes | (evicted[target] == 0)
    place = position - np.where(decodes, evicted[target], 0)
    held = int((last - evicted[: len(last)]).max()) + 1
    counts = table.ready[: len(last)].copy()
    counts[[row for _, sharers in prefills for row in sharers]] = True
    return GroupPlan(
        min(-(-held // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, group.places),
        _tensor(source[stay]),
        _tensor(target[stay]),
        _tensor(place[stay]),
        torch.from_numpy(counts.astype(np.float32)) if group.scores else None,
        tuple(again),
    )


def _plan_group(
    group: LayerGroup, last: IntArray, writes: tuple[IntArray, IntArray, IntArray], packed: int
) -> GroupPlan:
    """``last`` [n]: each row's newest position; ``writes``: packed token, row and position of each key to write."""
    source, target, position = writes
    longest = int(last.max()) + 1
    if longest > group.places:
        # Of two positions with one place, only the newer one is written.
        newest = position > last[target] - group.places
        source, target, position = source[newest], target[newest], position[newest] % group.places
    attended = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, group.places)
    every = len(source) == len(writes[0]) == packed
    return GroupPlan(attended, None if every else _tensor(source), _tensor(target), _tensor(position))


def plan_score(text: IntArray) -> ForwardPlan:
    """All logits of one text, on the host; nothing is cached."""
    return ForwardPlan(
        input_ids=_tensor(text),
        positions=torch.arange(len(text)),
        num_decode=0,
        num_logits=len(text),
        longest=len(text),
        buckets=make_buckets([len(text)], 0),
    )


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _tensor(array: IntArray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64))
