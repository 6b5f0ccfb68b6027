"""Bookkeeping of the hf engine's slots: which request sits in which row, and its tokens, log-probs and versions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from asyncrlhf.engines.sampling import Draws, seed_state
from asyncrlhf.types import FinishReason, GenerationRequest, IdArray, IntArray, Rollout


class SlotTable:
    """Arrays over ``slots`` rows; the active rows are ``0 .. count - 1``. All on the host, vectorised over rows.

    ``length`` counts the tokens a row holds, prompt included. A row is ``ready`` when the KV cache holds all of them
    but the last, which the next decode iteration feeds.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.count = 0
        self.requests: list[GenerationRequest | None] = [None] * slots
        self.tokens = np.zeros((slots, 0), np.int64)
        self.logprobs = np.zeros((slots, 0), np.float32)
        self.versions = np.zeros((slots, 0), np.int64)
        self.stops = np.zeros((slots, 0), np.int64)
        self.length = np.zeros(slots, np.int64)
        self.prompt_length = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.ready = np.zeros(slots, np.bool_)
        self.state = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float64)
        self.top_p = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots, np.float64)
        self.kept: list[list[IdArray]] = [[] for _ in range(slots)]  # of each response token, where truncated

    def occupy(self, row: int, request: GenerationRequest, ready: bool) -> None:
        prompt, sampling = request.prompt_ids, request.sampling
        limit = len(prompt) + sampling.max_completion_length
        self._widen(limit, len(sampling.stop_token_ids))
        self.requests[row] = request
        self.tokens[row, : len(prompt)] = prompt
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.length[row] = self.prompt_length[row] = len(prompt)
        self.limit[row] = limit
        self.ready[row] = ready
        self.state[row] = seed_state(request.seed)
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.kept[row] = []

    def _widen(self, length: int, stops: int) -> None:
        if length > self.tokens.shape[1]:
            extra = ((0, 0), (0, length - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, extra)
            self.logprobs = np.pad(self.logprobs, extra)
            self.versions = np.pad(self.versions, extra)
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=-1)

    def move(self, source: int, target: int) -> None:
        for array in (
            self.tokens,
            self.logprobs,
            self.versions,
            self.stops,
            self.length,
            self.prompt_length,
            self.limit,
            self.ready,
            self.state,
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
        ):
            array[target] = array[source]
        self.kept[target] = self.kept[source]
        self.requests[target], self.requests[source] = self.requests[source], None

    def append(self, rows: IntArray, draws: Draws, version: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Give each of ``rows`` one sampled token; returns the rows that ended and whether a stop token ended them."""
        place, tokens = self.length[rows], draws.tokens.cpu().numpy()
        self.tokens[rows, place] = tokens
        self.logprobs[rows, place] = draws.logprobs.cpu().numpy()
        self.versions[rows, place] = version
        self.length[rows] = place + 1
        if len(draws.kept_ids):
            ids, ends = draws.kept_ids.cpu().numpy().astype(np.int32), draws.kept_counts.cumsum(0).tolist()
            for row, start, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
                if end > start:
                    self.kept[row].append(ids[start:end])
        stopped = (tokens[:, None] == self.stops[rows]).any(axis=1)
        ended = np.flatnonzero(stopped | (place + 1 >= self.limit[rows]))
        return rows[ended], stopped[ended]

    def partial(self, seen: Mapping[int, int], at_least: int) -> dict[int, IntArray]:
        """Response tokens beyond the first ``seen`` ones of each request in it, where they are ``at_least`` so many."""
        found: dict[int, IntArray] = {}
        for row in np.flatnonzero(self.length[: self.count] - self.prompt_length[: self.count] >= at_least):
            request = self.requests[row]
            if request is None or request.rollout_id not in seen:
                continue
            start = int(self.prompt_length[row]) + seen[request.rollout_id]
            if self.length[row] - start >= at_least:
                found[request.rollout_id] = self.tokens[row, start : self.length[row]].copy()
        return found

    def take(self, row: int, reason: FinishReason) -> Rollout:
        """Empty a finished row into its result."""
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
        )
