"""The groups in the replay buffer, in the order of arrival, with counts by standing; and their form as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from asyncrlhf.turns import EpisodeFacts
from asyncrlhf.types import Payload, RolloutGroup, RolloutInfo

# ``open`` to a batch, open to ``replay`` alone, or over the bound: ``late`` if it was never trained, else ``over``.
Standing = Literal["open", "replay", "late", "over"]


class HeldGroups:
    """Groups by id. ``standing(group, version, bound)`` classifies a group; the groups in each class are counted once
    for a version and a bound, and the counts are then updated as groups arrive."""

    def __init__(self, standing: Callable[[RolloutGroup, int, int], Standing]) -> None:
        self._standing = standing
        self._groups: dict[int, RolloutGroup] = {}
        self._counted: tuple[tuple[int, int], Counter[Standing]] | None = None
        self.rollouts = 0
        self.of_step: Counter[int] = Counter()  # groups, by their scheduled step

    def __iter__(self) -> Iterator[RolloutGroup]:
        """In the order of arrival."""
        return iter(self._groups.values())

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def add(self, group: RolloutGroup) -> None:
        self._groups[group.group_id] = group
        self.rollouts += len(group)
        if group.scheduled_step is not None:
            self.of_step[group.scheduled_step] += 1
        if self._counted is not None:
            (version, bound), counts = self._counted
            counts[self._standing(group, version, bound)] += 1

    def use(self, group: RolloutGroup) -> RolloutGroup:
        """Count one training of the group; returns the updated group, at its old place in the order."""
        used = self._groups[group.group_id] = replace(group, uses=group.uses + 1)
        self._counted = None
        return used

    def remove(self, group: RolloutGroup) -> None:
        del self._groups[group.group_id]
        self.rollouts -= len(group)
        self._counted = None
        if group.scheduled_step is not None:
            self.of_step[group.scheduled_step] -= 1

    def counts(self, version: int, bound: int) -> Counter[Standing]:
        """Groups by their standing at ``version`` under ``bound``."""
        key = (version, bound)
        if self._counted is None or self._counted[0] != key:
            self._counted = (key, Counter(self._standing(group, version, bound) for group in self))
        return self._counted[1]


def group_to_json(group: RolloutGroup) -> dict[str, Any]:
    """The group as JSON values for checkpoints, without its payloads, which are saved separately."""
    # vars() and not dataclasses.asdict(), which would copy the payload.
    rollouts = [{k: v for k, v in vars(r).items() if k != "payload"} for r in group.rollouts]
    for row in rollouts:
        if row["episode"] is not None:
            row["episode"] = asdict(row["episode"])
    return {"group_id": group.group_id, "rollouts": rollouts, "step": group.scheduled_step, "uses": group.uses}


def group_from_json(value: Mapping[str, Any], payloads: Mapping[int, Payload]) -> RolloutGroup:
    """The group from JSON values; ``payloads`` by rollout id."""
    rollouts = tuple(_info(row, payloads[row["rollout_id"]]) for row in value["rollouts"])
    return RolloutGroup(value["group_id"], rollouts, value["step"], value["uses"])


def _info(row: Mapping[str, Any], payload: Payload) -> RolloutInfo:
    facts = row["episode"]
    return RolloutInfo(**{**row, "payload": payload, "episode": facts and EpisodeFacts(**facts)})
