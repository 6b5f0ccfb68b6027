"""The keys and values of the layers of one shape, one row per slot; layers with a sliding window keep only their
window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from asyncrlhf.engines.hf.layer_shapes import LayerShape
from asyncrlhf.engines.hf.slot_attention import (
    LENGTH_MULTIPLE,
    PrefillBucket,
    Scoring,
    decode_attention,
    prefill_attention,
)


@dataclass(frozen=True)
class Again:
    """A row that lost tokens and is prefilled anew: packed tokens ``start`` to ``start`` + ``size``."""

    row: int
    start: int
    size: int
    evicted: int  # tokens


@dataclass(frozen=True)
class GroupPlan:
    """Where the layers of one :class:`LayerGroup` write, and what their decoding rows attend to."""

    attended: int  # places of a row that decoding rows attend to
    source: torch.Tensor | None  # [W] token of each write; None: token w itself
    rows: torch.Tensor  # [W] where it goes
    places: torch.Tensor  # [W]; the first ones are those of the decoding rows
    counts: torch.Tensor | None = None  # [n] 1 for rows whose queries count, else 0; where tokens are scored
    again: tuple[Again, ...] = ()


class LayerGroup:
    """Keys [layers, slots, Hkv, places, D] and values [layers, slots, Hkv, places, Dv] of all layers of one shape.

    Position t is at place ``t % places``: a row of a layer with a window is a ring, in which a new token replaces one
    that no query sees any more. The other layers have a place for each position.
    """

    def __init__(self, shape: LayerShape, layers: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        rows = (layers, slots, shape.kv_heads, 0)
        self._keys = torch.zeros((*rows, shape.key_dim), dtype=dtype, device=device)
        self._values = torch.zeros((*rows, shape.value_dim), dtype=dtype, device=device)
        self._seen, self._unseen = torch.tensor([0.0, -torch.inf], dtype=dtype, device=device)

    @property
    def places(self) -> int:
        return self._keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def reserve(self, length: int, kept: int) -> None:
        """Make room for ``length`` positions, or for the window if that is less. ``kept``: of them all that stay where
        tokens are evicted."""
        window = self.shape.window
        # A ring only grows while it holds every position of its rows, so that none changes its place.
        more = (length if window is None else min(length, rounded(window))) - self.places
        if more > 0:
            # Zeros, not empty: a masked position that holds NaN would still poison the product with the values.
            self._keys, self._values = F.pad(self._keys, (0, 0, 0, more)), F.pad(self._values, (0, 0, 0, more))

    def release(self) -> None:
        self._keys, self._values = self._keys[:, :, :, :0].clone(), self._values[:, :, :, :0].clone()

    def can_copy(self, tokens: int, prompt: int) -> bool:
        """As ``Passes.can_copy``: whether no key that a row with this prompt still sees was replaced."""
        window = self.shape.window
        return window is None or tokens - 1 - self.places < max(0, prompt - window)

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        for data in (self._keys, self._values):
            data[:, target, :, :length] = data[:, source, :, :length]

    def bias(self, last: torch.Tensor, attended: int) -> torch.Tensor:
        """0 for those of the first places [n, 1, 1, attended] that hold a key which the newest tokens, at positions
        ``last`` [n], see; -inf for the others."""
        newest, place = last[:, None, None, None], torch.arange(attended, device=last.device)
        if self.shape.window is None:
            return torch.where(place <= newest, self._seen, self._unseen)
        age = (newest - place) % self.places
        return torch.where((age <= newest) & (age < self.shape.window), self._seen, self._unseen)

    def newest(self, plan: GroupPlan, last: torch.Tensor) -> torch.Tensor:
        """What :meth:`bias` takes, of decoding rows whose newest positions are ``last`` [n]."""
        return last

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, plan: GroupPlan) -> None:
        """Write keys [T, Hkv, D] and values [T, Hkv, Dv] of the group's layer ``index``."""
        for data, states in ((self._keys, key), (self._values, value)):
            written = states if plan.source is None else states[plan.source]
            data[index].transpose(1, 2).index_put_((plan.rows, plan.places), written)

    def decode(
        self, index: int, query: torch.Tensor, scoring: Scoring, bias: torch.Tensor, plan: GroupPlan
    ) -> torch.Tensor:
        """Attention of decoding rows [n, H, D] over their places -> [n, H * Dv]."""
        return decode_attention(query, *self._seen_by(index, len(query), bias.shape[-1]), bias, scoring)

    def prefill(
        self, index: int, states: Sequence[torch.Tensor], scoring: Scoring, bucket: PrefillBucket
    ) -> torch.Tensor:
        """Attention of prefilled sequences over their own: query [t, H, D], key and value -> [t, H * Dv]."""
        query, key, value = states
        return prefill_attention(query, key, value, scoring, self.shape.window, bucket)

    def _seen_by(self, index: int, rows: int, attended: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys[index, :rows, :, :attended], self._values[index, :rows, :, :attended]


def rounded(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
