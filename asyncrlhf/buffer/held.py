"""What the replay buffer holds, in the order of arrival, with the counts that its looks need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from asyncrlhf.types import RolloutGroup

# ``open`` to a batch, open to ``replay`` alone, or over the bound: ``late`` if it was never trained, else ``over``.
Standing = Literal["open", "replay", "late", "over"]


@dataclass(eq=False)
class Held:
    """A group in the buffer. ``uses``: trainings so far; ``oldest``: the version of its oldest token."""

    group: RolloutGroup
    arrival: int
    scheduled_step: int | None
    uses: int = 0
    oldest: int = field(init=False)

    def __post_init__(self) -> None:
        self.oldest = self.group.min_version


class HeldGroups:
    """Groups by id. ``standing(item, version, bound)`` says what a group is good for; the groups in each standing are
    counted once for a version and a bound, and then kept up with what arrives."""

    def __init__(self, standing: Callable[[Held, int, int], Standing]) -> None:
        self._standing = standing
        self._items: dict[int, Held] = {}
        self._counted: tuple[tuple[int, int], Counter[Standing]] | None = None
        self.rollouts = 0
        self.of_step: Counter[int] = Counter()  # groups, by their scheduled step

    def __iter__(self) -> Iterator[Held]:
        """In the order of arrival."""
        return iter(self._items.values())

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._items

    def add(self, item: Held) -> None:
        self._items[item.group.group_id] = item
        self.rollouts += len(item.group)
        if item.scheduled_step is not None:
            self.of_step[item.scheduled_step] += 1
        if self._counted is not None:
            (version, bound), counts = self._counted
            counts[self._standing(item, version, bound)] += 1

    def use(self, item: Held) -> None:
        """Count one training."""
        item.uses += 1
        self._counted = None

    def remove(self, item: Held) -> None:
        del self._items[item.group.group_id]
        self.rollouts -= len(item.group)
        self._counted = None
        if item.scheduled_step is not None:
            self.of_step[item.scheduled_step] -= 1

    def counts(self, version: int, bound: int) -> Counter[Standing]:
        """Groups by their standing at ``version`` under ``bound``."""
        key = (version, bound)
        if self._counted is None or self._counted[0] != key:
            self._counted = (key, Counter(self._standing(item, version, bound) for item in self))
        return self._counted[1]
