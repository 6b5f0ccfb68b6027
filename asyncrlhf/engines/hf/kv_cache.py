"""The KV cache of the hf engine: one row per slot; layers with a sliding window keep only their window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from asyncrlhf.models.copies import all_to_device, to_device


@dataclass(frozen=True)
class GroupPlan:
    """Where the layers of one :class:`LayerGroup` write, and what their decoding rows attend to."""

    attended: int  # places of a row that decoding rows attend to
    source: torch.Tensor | None  # [W] token of each write; None: token w itself
    rows: torch.Tensor  # [W] where it goes
    places: torch.Tensor  # [W]


@dataclass(frozen=True)
class ForwardPlan:
    """One forward pass over packed tokens [T]: first one token of each decoding row, then the prefilled sequences.

    Prefilled tokens only write keys and values; logits are computed for the first ``num_logits`` tokens. Tensors are on
    the host until :meth:`KVCache.placed`.
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    num_decode: int
    num_logits: int
    longest: int  # the largest position
    buckets: tuple[PrefillBucket, ...]
    groups: tuple[GroupPlan, ...] = ()  # of the cache's groups; none: nothing is written, and no row decodes
    biases: tuple[torch.Tensor, ...] = ()  # of each group [num_decode, 1, 1, attended] 0 or -inf


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

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions, or for the window if that is less."""
        window = self.shape.window
        # A ring only grows while it holds every position of its rows, so that none changes its place.
        more = (length if window is None else min(length, _rounded(window))) - self.places
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

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, plan: GroupPlan) -> None:
        """Write keys [T, Hkv, D] and values [T, Hkv, Dv] of the group's layer ``index``."""
        for data, states in ((self._keys, key), (self._values, value)):
            written = states if plan.source is None else states[plan.source]
            data[index].transpose(1, 2).index_put_((plan.rows, plan.places), written)

    def decode(self, index: int, query: torch.Tensor, scoring: Scoring, bias: torch.Tensor) -> torch.Tensor:
        """Attention of decoding rows [n, H, D] over their places -> [n, H * Dv]."""
        key, value = (data[index, : len(query), :, : bias.shape[-1]] for data in (self._keys, self._values))
        return decode_attention(query, key, value, bias, scoring)


class KVCache:
    """A row of ``capacity`` positions per slot for all layers, which are grouped by their shape.

    The batch's active rows are the first ones, so that attention reads a slice and never gathers.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """``shapes``: of each layer, by the index that :meth:`attend` gets."""
        members: dict[LayerShape, list[int]] = {}
        for layer, shape in shapes.items():
            members.setdefault(shape, []).append(layer)
        self.groups = [LayerGroup(shape, len(layers), slots, dtype, device) for shape, layers in members.items()]
        self._where = {
            layer: (group, index) for group, layers in enumerate(members.values()) for index, layer in enumerate(layers)
        }
        self.capacity, self.dtype = 0, dtype
        self._device = device

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions in every row."""
        if length <= self.capacity:
            return
        self.capacity = _rounded(length)
        for group in self.groups:
            group.reserve(self.capacity)

    def release(self) -> None:
        self.capacity = 0
        for group in self.groups:
            group.release()

    def can_copy(self, tokens: int, prompt: int) -> bool:
        return all(group.can_copy(tokens, prompt) for group in self.groups)

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy what is kept of the first ``length`` positions of rows ``source`` to rows ``target``."""
        src, dst = to_device(torch.tensor([source, target]), self._device)
        for group in self.groups:
            group.copy_rows(src, dst, length)

    def placed(self, plan: ForwardPlan) -> ForwardPlan:
        """``plan`` on the cache's device, which gets it in one copy, with its biases."""
        optional = [x for bucket in plan.buckets for x in (bucket.pad, bucket.unpad)]
        optional += [x for group in plan.groups for x in (group.source, group.rows, group.places)]
        given = [plan.input_ids, plan.positions, *(x for x in optional if x is not None)]
        ids, positions, *others = all_to_device(given, self._device)
        rest = iter(others)

        def there(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else next(rest)

        buckets = tuple(replace(bucket, pad=there(bucket.pad), unpad=there(bucket.unpad)) for bucket in plan.buckets)
        groups = tuple(GroupPlan(x.attended, there(x.source), next(rest), next(rest)) for x in plan.groups)
        last = positions[: plan.num_decode]
        biases = tuple(group.bias(last, x.attended) for group, x in zip(self.groups, plan.groups, strict=False))
        return replace(plan, input_ids=ids, positions=positions, buckets=buckets, groups=groups, biases=biases)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        plan: ForwardPlan,
    ) -> torch.Tensor:
        """Write this layer's keys and values, then attend: query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv]
        -> [T, H * Dv]."""
        number, index = self._where[layer]
        group = self.groups[number]
        parts = []
        if plan.groups:
            group.write(index, key, value, plan.groups[number])
            parts.append(group.decode(index, query[: plan.num_decode], scoring, plan.biases[number]))
        for bucket in plan.buckets:
            part = slice(bucket.start, bucket.stop)
            parts.append(prefill_attention(query[part], key[part], value[part], scoring, group.shape.window, bucket))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rounded(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
