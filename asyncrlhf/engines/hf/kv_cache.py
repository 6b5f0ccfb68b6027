"""The KV cache of the hf engine: one row per slot, in groups of layers with one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.hf.kept_group import KeptGroup
from asyncrlhf.engines.hf.layer_group import GroupPlan, LayerGroup, rounded
from asyncrlhf.engines.hf.layer_shapes import LayerShape
from asyncrlhf.engines.hf.slot_attention import PrefillBucket, Scoring
from asyncrlhf.models.copies import all_to_device, to_device
from asyncrlhf.types import IntArray


@dataclass(frozen=True)
class Kept:
    """That tokens are evicted: of each response at most ``budget`` stay. ``separators``: bool, of token ids."""

    config: CacheConfig
    budget: int
    separators: Callable[[IntArray], NDArray[np.bool_]]


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


class KVCache:
    """A row of ``capacity`` positions per slot for all layers, which are grouped by their shape.

    The batch's active rows are the first ones, so that attention reads a slice and never gathers.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: Kept | None = None,
    ) -> None:
        """``shapes``: of each layer, by the index that :meth:`attend` gets. ``slots``: rows. ``kept``: layers that see
        all earlier tokens lose some; those with a window keep it."""
        members: dict[LayerShape, list[int]] = {}
        for layer, shape in shapes.items():
            members.setdefault(shape, []).append(layer)
        self.kept = kept
        self.groups = [
            LayerGroup(shape, len(layers), slots, dtype, device)
            if kept is None or shape.window is not None
            else KeptGroup(shape, len(layers), slots, dtype, device, kept.config, kept.budget)
            for shape, layers in members.items()
        ]
        self._where = {
            layer: (group, index) for group, layers in enumerate(members.values()) for index, layer in enumerate(layers)
        }
        self.capacity, self.dtype = 0, dtype
        self._places = 0  # of layers that evict
        self._asleep = 0  # the capacity before a release
        self.device = device

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def reserve(self, length: int, response: int = 0) -> None:
        """Make room for ``length`` positions in every row, of which ``response`` at most are a response."""
        places = length - response + min(response, self.kept.budget if self.kept else response)
        if length <= self.capacity and places <= self._places:
            return
        self.capacity, self._places = max(self.capacity, rounded(length)), max(self._places, rounded(places))
        for group in self.groups:
            group.reserve(self.capacity, self._places)

    def release(self) -> None:
        self._asleep, self.capacity = max(self._asleep, self.capacity), 0
        for group in self.groups:
            group.release()

    def restore(self) -> None:
        self.capacity = max(self.capacity, self._asleep)
        for group in self.groups:
            group.reserve(self.capacity, self._places)

    def can_copy(self, tokens: int, prompt: int) -> bool:
        return all(group.can_copy(tokens, prompt) for group in self.groups)

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy what is kept of the first ``length`` positions of rows ``source`` to rows ``target``."""
        src, dst = to_device(torch.tensor([source, target]), self.device)
        for group in self.groups:
            group.copy_rows(src, dst, length)

    def stayed(self, row: int, part: slice) -> dict[str, NDArray[np.bool_]]:
        groups = {i: group.stayed(row, part) for i, group in enumerate(self.groups) if isinstance(group, KeptGroup)}
        return {
            f"layer {layer}, head {head}": places
            for layer, (group, index) in self._where.items()
            if group in groups
            for head, places in enumerate(groups[group][index])
        }

    def placed(self, plan: ForwardPlan) -> ForwardPlan:
        """``plan`` on the cache's device, which gets it in one copy, with its biases."""
        optional = [x for bucket in plan.buckets for x in (bucket.pad, bucket.unpad)]
        optional += [x for group in plan.groups for x in (group.source, group.rows, group.places, group.counts)]
        given = [plan.input_ids, plan.positions, *(x for x in optional if x is not None)]
        ids, positions, *others = all_to_device(given, self.device)
        rest = iter(others)

        def there(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else next(rest)

        buckets = tuple(replace(bucket, pad=there(bucket.pad), unpad=there(bucket.unpad)) for bucket in plan.buckets)
        groups = tuple(
            replace(x, source=there(x.source), rows=next(rest), places=next(rest), counts=there(x.counts))
            for x in plan.groups
        )
        last = positions[: plan.num_decode]
        biases = tuple(
            group.bias(group.newest(x, last), x.attended) for group, x in zip(self.groups, groups, strict=False)
        )
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
            decoding, bias = query[: plan.num_decode], plan.biases[number]
            parts.append(group.decode(index, decoding, scoring, bias, plan.groups[number]))
        for bucket in plan.buckets:
            part = slice(bucket.start, bucket.stop)
            parts.append(group.prefill(index, (query[part], key[part], value[part]), scoring, bucket))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
