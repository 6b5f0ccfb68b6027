"""Layers of one shape whose rows lose tokens: which keys and values stay, by layer and key-value head.

A row's places hold what stays in the order of the positions, equally many in each layer and head: the prompt, then
response tokens, the newest ``window`` last. Keys keep the rotary positions that they were written with. When the
response fills its budget, the ``every`` tokens with the lowest scores go, and the rest moves up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.hf.layer_group import GroupPlan, LayerGroup
from asyncrlhf.engines.hf.layer_shapes import LayerShape
from asyncrlhf.engines.hf.slot_attention import PrefillBucket, Scoring, decode_and_weights, prefill_attention

STAYS = torch.iinfo(torch.int32).max
EARLY = 3  # chunks are found in the first layers, one of so many
TINY = 1e-6  # attention below which no place is a boundary


@dataclass(frozen=True)
class Due:
    """Rows [r] whose response fills its budget, each tensor [r] on the cache's device."""

    rows: torch.Tensor
    prompt: torch.Tensor
    evicted: torch.Tensor  # tokens that the row has lost
    last: torch.Tensor  # position of the next query, the first that does not see what goes now
    separators: torch.Tensor | None  # [r, length] by position; for that policy


class KeptGroup(LayerGroup):
    """A ``LayerGroup`` without a window, with at most ``budget`` tokens of each row's response."""

    def __init__(
        self, shape: LayerShape, layers: int, slots: int, dtype: torch.dtype, device: torch.device,
        config: CacheConfig, budget: int,
    ) -> None:  # fmt: skip
        super().__init__(shape, layers, slots, dtype, device)
        self._config, self._budget = config, budget
        self._early = max(1, layers // EARLY)
        rows = (layers, slots, shape.kv_heads, 0)
        self._scores = torch.zeros(rows if self.scores else (0, 0, 0, 0), device=device)  # by place
        self._gone = torch.zeros(rows, dtype=torch.int32, device=device)  # by position: the first query without it

    @property
    def scores(self) -> bool:
        """Whether decoding rows score the tokens that they attend to."""
        return self._config.policy in ("heavy_hitters", "chunk_sink")

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(x.nbytes for x in (self._scores, self._gone))

    def reserve(self, length: int, kept: int) -> None:
        super().reserve(kept, kept)
        if self.scores and (more := kept - self._scores.shape[3]) > 0:
            self._scores = F.pad(self._scores, (0, more))
        if (more := length - self._gone.shape[3]) > 0:
            self._gone = F.pad(self._gone, (0, more), value=STAYS)

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        super().copy_rows(source, target, length)
        if self.scores:
            self._scores[:, target, :, :length] = self._scores[:, source, :, :length]
        self._gone[:, target] = self._gone[:, source]  # also of tokens to come, which the target may hide

    def newest(self, plan: GroupPlan, last: torch.Tensor) -> torch.Tensor:
        places = plan.places[: len(last)]
        if self.scores:  # what stood there before was scored by other tokens
            self._scores[:, plan.rows[: len(last)], :, places] = 0.0
        return places

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, plan: GroupPlan) -> None:
        super().write(index, key, value, plan)
        for again in plan.again:
            held = again.size - again.evicted
            positions = _left(self._gone[index, again.row])[:, :held]
            heads = torch.arange(len(positions), device=key.device)[:, None]
            for data, states in ((self._keys, key), (self._values, value)):
                data[index, again.row, :, :held] = states[again.start + positions, heads]

    def decode(
        self, index: int, query: torch.Tensor, scoring: Scoring, bias: torch.Tensor, plan: GroupPlan
    ) -> torch.Tensor:
        if not self.scores or (self._config.policy == "chunk_sink" and index >= self._early):
            return super().decode(index, query, scoring, bias, plan)
        seen = self._seen_by(index, len(query), bias.shape[-1])
        attended, weights = decode_and_weights(query, *seen, bias, scoring)
        assert plan.counts is not None
        weights = weights * plan.counts[:, None, None]
        if self._config.policy == "heavy_hitters":
            self._scores[index, : len(query), :, : bias.shape[-1]] += weights
        else:
            self._add_boundaries(index, weights, plan.places[: len(query)])
        return attended

    def _add_boundaries(self, index: int, weights: torch.Tensor, newest: torch.Tensor) -> None:
        """Add to the scores of the newest ``half`` places how much more the newest query attends to what lies from
        each of them on than to as many tokens before it: the newest row of a checkerboard kernel (Foote 2000) along
        the diagonal of the attention. ``weights`` [n, Hkv, A], ``newest`` [n]."""
        half = self._config.half
        near = newest[:, None] + torch.arange(1 - 2 * half, 1, device=newest.device)
        places = near.clamp_min(0)[:, None].expand(-1, weights.shape[1], -1)
        mass = F.pad((weights.gather(2, places) * (near >= 0)[:, None]).cumsum(-1), (1, 0))
        within, across = mass[..., -1:] - mass[..., half:-1], mass[..., half:-1] - mass[..., :half]
        novelty = (within - across) / (within + across + TINY) * (within + across > TINY)
        self._scores[index, : len(newest)].scatter_add_(2, places[..., half:], novelty.float())

    def prefill(
        self, index: int, states: Sequence[torch.Tensor], scoring: Scoring, bucket: PrefillBucket
    ) -> torch.Tensor:
        if bucket.row is None:
            return super().prefill(index, states, scoring, bucket)
        query, key, value = states
        gone = self._gone[index, bucket.row, :, : bucket.stop - bucket.start]
        return prefill_attention(query, key, value, scoring, None, bucket, gone)

    def stayed(self, row: int, part: slice) -> NDArray[np.bool_]:
        """[layers, Hkv, part] of a row that has lost tokens: which positions are still there."""
        found: NDArray[np.bool_] = (self._gone[:, row, :, part] == STAYS).cpu().numpy()
        return found

    def evict(self, due: Due) -> None:
        """Let ``every`` tokens of each row go, in each layer and head those with the lowest scores."""
        config, place = self._config, torch.arange(self.places, device=due.rows.device)
        prompt, first = due.prompt[:, None], (due.evicted == 0)[:, None]
        held = prompt + self._budget

        def spread(rows: torch.Tensor) -> torch.Tensor:
            return rows[None, :, None]  # [r, places] over layers and heads

        left = torch.where(first[None, :, None], STAYS, self._gone[:, due.rows])  # else of an earlier request
        positions = _left(left)[..., : self.places]
        scores = self._rated(due, positions, place, prompt, held, first)
        free = (place >= prompt) & (place < held - config.window)
        rank = torch.where(spread(free), scores, torch.where(spread(place < held), torch.inf, -torch.inf))
        rank = rank.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        stays = rank < spread(held - config.every)
        moved = (~stays).to(torch.uint8).argsort(dim=-1, stable=True)
        gone = (stays | spread(place >= held)).to(torch.uint8).argsort(dim=-1, stable=True)[..., : config.every]

        when = due.last.int()[None, :, None, None].expand(gone.shape)
        self._gone[:, due.rows] = left.scatter(3, positions.gather(3, gone), when)
        for data in (self._keys, self._values):
            chosen = moved[..., None].expand(*moved.shape, data.shape[-1])
            data[:, due.rows] = data[:, due.rows].gather(3, chosen)
        if self.scores:
            self._scores[:, due.rows] = scores.gather(3, moved)

    def _rated(
        self, due: Due, positions: torch.Tensor, place: torch.Tensor, prompt: torch.Tensor, held: torch.Tensor,
        first: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Scores [layers, r, Hkv, places]: the highest stay."""
        config = self._config
        if not self.scores:
            newest = positions.float()
            if due.separators is None:
                return newest
            flags = due.separators[None, :, None].expand(len(positions), -1, self.shape.kv_heads, -1)
            inside = positions.clamp_max(flags.shape[-1] - 1)
            return newest + flags.gather(3, inside).float() * self._gone.shape[3]
        scores = self._scores[:, due.rows]
        if config.policy == "heavy_hitters":
            return scores
        # Places that leave the window now are the same tokens in every layer and head.
        start = torch.where(first, prompt, held - config.every - config.window)
        leaving = (place >= start) & (place < held - config.window)
        own = scores
        if self._early < len(scores):
            mean = (
                scores[: self._early]
                .mean(dim=(0, 2), keepdim=True)
                .expand(len(scores) - self._early, *scores.shape[1:])
            )
            own = torch.cat([scores[: self._early], mean])
        ahead = own.roll(-1, dims=-1)
        kept = {"first": own, "last": ahead, "both": torch.maximum(own, ahead)}[config.keep]
        return torch.where(leaving[None, :, None], kept, scores)


def _left(gone: torch.Tensor) -> torch.Tensor:
    """The positions [..., L] of the places in turn, from the first query without each position [..., L]: what stays, in
    its order. The last places, one for each that went, have no meaning."""
    stays, last = gone == STAYS, gone.shape[-1]
    place = torch.where(stays, stays.cumsum(-1) - 1, last)
    position = torch.arange(last, device=gone.device).expand(gone.shape)
    return F.pad(torch.zeros_like(place), (0, 1)).scatter_(-1, place, position)[..., :-1]
