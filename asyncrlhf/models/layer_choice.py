"""Which layers of a model's config a small model of its family keeps: one or two of each kind, in their order."""

from __future__ import annotations

import re
from typing import Any

LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|num_blocks|num_(encoder|decoder)_layers|(encoder|decoder)_layers|"
    r"num_layers_per_stack)$"
)
# The number of layers from the first, or from the last, that are of another kind.
_FIRST = re.compile(r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$")
_LAST = re.compile(r"^num_kv_shared_layers$")
_PERIODS = re.compile(r"_(period|interval|step|freq|every_n_layers|pattern)$")
_OFFSETS = re.compile(r"_offset$")
_INDICES = re.compile(r"(layers|idxs|layer_ids|layer_indices)$")
LONGEST_PERIOD = 3
EACH = 2  # layers of one kind, where a config has few kinds
FEW = 3


class LayerChoice:
    """Chooses the layers of ``sizes``, a config as a dictionary, and writes the shorter lists and counts into it."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self._sizes = sizes
        counts = [v for k, v in sizes.items() if LAYER_COUNTS.match(k) and isinstance(v, int)]
        self._count = max(counts, default=0)

    def apply(self) -> None:
        """Keep the first layers of each kind; fields that name layers by their place are renumbered."""
        if not self._count:
            return
        kept = self._kept()
        sizes = self._sizes
        # A shorter list of kinds repeats over the layers: the first round has all of them.
        rounds = [len(v) for k, v in sizes.items() if k.endswith("_types") and self._repeats(v)]
        if rounds:
            kept = list(range(min(max(rounds), self._count)))
        periods = len(set(self._kinds())) == 1 and any(
            _PERIODS.search(k) and type(v) is int and v > 1 for k, v in sizes.items()
        )
        while periods and len(kept) < min(2 * LONGEST_PERIOD, self._count):
            kept = sorted({*kept, next(i for i in range(self._count) if i not in kept)})
        for name, value in sizes.items():
            sizes[name] = self._renumbered(name, value, kept)

    def _kinds(self) -> list[Any]:
        found: list[list[str]] = [[] for _ in range(self._count)]
        for name, value in self._sizes.items():
            for i in range(self._count):
                if isinstance(value, list) and len(value) == self._count and not self._places(name, value):
                    found[i].append(str(value[i]))
                elif self._places(name, value):
                    found[i].append(str(i in value))
                elif self._by_place(value):
                    found[i].append(str({int(k): v for k, v in value.items()}.get(i)))
                elif _FIRST.match(name) and isinstance(value, int):
                    found[i].append(str(i < value))
                elif _LAST.match(name) and isinstance(value, int):
                    found[i].append(str(i >= self._count - value))
        return [tuple(kind) for kind in found]

    def _kept(self) -> list[int]:
        kinds = self._kinds()
        each = EACH if len(set(kinds)) <= FEW else 1
        return [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < each]

    def _renumbered(self, name: str, value: Any, kept: list[int]) -> Any:
        if LAYER_COUNTS.match(name) and isinstance(value, int):
            return min(value, len(kept))
        if self._places(name, value):
            return [kept.index(i) for i in value if i in kept]
        if isinstance(value, list) and len(value) == self._count:
            return [value[i] for i in kept]
        if self._by_place(value):
            return {type(k)(str(kept.index(int(k)))): v for k, v in value.items() if int(k) in kept}
        if type(value) is not int:
            return value
        if _FIRST.match(name):
            return sum(i < value for i in kept)
        if _LAST.match(name):
            return sum(i >= self._count - value for i in kept)
        if _PERIODS.search(name):
            return min(value, LONGEST_PERIOD)
        if _OFFSETS.search(name):
            return min(value, LONGEST_PERIOD - 1)
        return value

    def _places(self, name: str, value: Any) -> bool:
        """Whether ``value`` lists places of layers."""
        if not isinstance(value, list) or not _INDICES.search(name) or not all(type(i) is int for i in value):
            return False
        return all(0 <= i < self._count for i in value) and len(set(value)) == len(value)

    def _repeats(self, value: Any) -> bool:
        return isinstance(value, list) and 1 < len(value) < self._count and all(isinstance(kind, str) for kind in value)

    def _by_place(self, value: Any) -> bool:
        return (
            isinstance(value, dict)
            and bool(value)
            and all(str(k).isdigit() for k in value)
            and not (all(str(v).startswith("LABEL_") for v in value.values()))
        )
