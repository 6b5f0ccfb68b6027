"""The bounded replay buffer: holds finished groups and decides which of them train at which version."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrlhf.buffer.admission import resolve_capacity, scheduled_versions
from asyncrlhf.buffer.config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.records import group_from_json, group_to_json
from asyncrlhf.buffer.sampling import CHOOSERS
from asyncrlhf.errors import LedgerError, StaleBatchError
from asyncrlhf.types import DropReason, Payload, RolloutGroup

SPREAD_EPS = 1e-3  # so that a group without spread keeps a small chance of being drawn


@dataclass(frozen=True)
class Taken:
    """A group in a batch. ``weight`` multiplies the loss of its rollouts; ``uses_left`` 0 marks its last use."""

    group: RolloutGroup
    weight: float
    masked_before_version: int  # over_stale=mask: tokens older than this leave the loss
    uses_left: int


@dataclass(frozen=True)
class Evicted:
    """A group that left without its last use; ``uses_left`` is what the gate gets back."""

    group: RolloutGroup
    reason: DropReason
    uses_left: int


@dataclass
class _Held:
    group: RolloutGroup
    arrival: int
    scheduled_step: int | None
    uses: int = 0


def _spread(group: RolloutGroup) -> float:
    rewards = [r.reward for r in group.rollouts]
    return max(rewards) - min(rewards)


def _reward_spread_priority(group: RolloutGroup, version: int) -> float:
    """(sd of the rewards + eps)^0.5; after 2606.04560, with the spread in the place of |A|."""
    return math.sqrt(float(np.std([r.reward for r in group.rollouts])) + SPREAD_EPS)


def _age_priority(group: RolloutGroup, version: int) -> float:
    return 1.0 / (1.0 + max(0, group.staleness(version)))


PRIORITY: dict[str, Callable[[RolloutGroup, int], float]] = {
    "reward_spread": _reward_spread_priority,
    "age": _age_priority,
}


class ReplayBuffer:
    """Counts places by rollout: ``held + reserved <= capacity``, reserved being what is in flight.

    The order of calls at the step of version v: :meth:`evict`, :meth:`take`, :meth:`check_batch`. Deterministic: equal
    groups in, with equal arrival order, and an equal seed give equal batches; ``uniform`` and ``priority`` do not look
    at the arrival order.
    """

    def __init__(
        self, config: BufferConfig, async_config: AsyncConfig, *, batch_size: int, num_generations: int, seed: int
    ) -> None:
        self._config = config
        self._over_stale = async_config.over_stale
        self._bound = async_config.bound
        self._scheduled = async_config.fixed_lag is not None
        self._groups_per_step = batch_size // num_generations
        self._num_generations = num_generations
        self.capacity = resolve_capacity(config, async_config, batch_size)
        self._groups: dict[int, _Held] = {}
        self._closed: Counter[int] = Counter()  # groups of a scheduled step that will never come
        self._reserved = 0
        self._arrivals = 0
        self._last_taken = -1
        self._resumed_at = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))

    @property
    def held(self) -> int:
        """Finished rollouts in the buffer."""
        return sum(len(item.group) for item in self._groups.values())

    @property
    def reserved(self) -> int:
        """Places kept for rollouts in flight."""
        return self._reserved

    @property
    def free(self) -> int:
        return self.capacity - self.held - self._reserved

    def groups(self) -> list[RolloutGroup]:
        """The held groups by group id."""
        return [self._groups[i].group for i in sorted(self._groups)]

    def reserve(self, rollouts: int) -> None:
        """Keep places for rollouts about to start; raises LedgerError beyond ``free``."""
        if rollouts > self.free:
            raise LedgerError(
                f"{rollouts} places were asked of the buffer, which has {self.free} of {self.capacity} free."
            )
        self._reserved += rollouts

    def release(self, rollouts: int) -> None:
        """Give back the places of rollouts that failed or were dropped in flight."""
        if rollouts > self._reserved:
            raise LedgerError(
                f"{rollouts} places were given back to the buffer, but only {self._reserved} are reserved."
            )
        self._reserved -= rollouts

    def add(self, group: RolloutGroup, scheduled_step: int | None = None) -> DropReason | None:
        """Put a finished group in the place reserved for it; the reason when it is refused (its places are free then).

        ``scheduled_step`` is what the gate's ``admit`` gave. A group is short of siblings only when they failed, and
        the caller has released their places.
        """
        if not 1 <= len(group) <= self._num_generations or group.group_id in self._groups:
            raise LedgerError(f"group {group.group_id} with {len(group)} rollouts is empty, too large or held already.")
        if (scheduled_step is not None) != self._scheduled:
            raise LedgerError(
                f"group {group.group_id} came with scheduled step {scheduled_step} in the other kind of mode."
            )
        self.release(len(group))
        if self._config.filter_zero_spread and _spread(group) == 0.0:
            if scheduled_step is not None:
                self.close_group(group.group_id, scheduled_step)
            return "untrainable"
        self._groups[group.group_id] = _Held(group, self._arrivals, scheduled_step)
        self._arrivals += 1
        return None

    def close_group(self, group_id: int, scheduled_step: int) -> None:
        """The whole group failed: the batch of its step does not wait for it."""
        if group_id in self._groups:
            raise LedgerError(f"group {group_id} is held and cannot be closed.")
        self._closed[scheduled_step] += 1

    def evict(self, version: int) -> list[Evicted]:
        """Remove what may not train at ``version`` or later: ``stale``. A scheduled mode and ``downweight`` keep all.

        ``drop`` removes groups over the bound; ``mask`` only those without one token inside it; ``wait`` only those
        that were trained before and wait for another use.
        """
        gone = [
            item
            for item in self._groups.values()
            if self._is_over(item, version) and (self._over_stale != "wait" or item.uses > 0)
        ]
        for item in gone:
            del self._groups[item.group.group_id]
        return [Evicted(item.group, "stale", self._config.max_reuse - item.uses) for item in gone]

    def must_wait(self, version: int, in_flight_versions: Iterable[int]) -> bool:
        """Whether the step at ``version`` has to wait for stragglers (``over_stale=wait``).

        ``in_flight_versions`` holds one entry for each unfinished group: the lowest version its replicas held when it
        was admitted or begun. The step waits while more than ``k`` steps' worth of unfinished groups have only ``k``
        steps left after this one, for any k. (k = 0 alone is not enough: when fresher groups overtake, several batches
        of stragglers would reach the bound at one step.)
        """
        if self._scheduled or self._over_stale != "wait":
            return False
        pending = sorted(v for v in in_flight_versions if v <= version)
        return any(
            position + 1 > max(0, begun - (version - self._bound)) * self._groups_per_step
            for position, begun in enumerate(pending)
        )

    def take(self, version: int, in_flight_versions: Iterable[int] = ()) -> list[Taken] | None:
        """The batch that moves the policy from ``version`` to ``version + 1``, by group id; None while it is not there.

        ``in_flight_versions`` is read by ``over_stale=wait`` only, as in :meth:`must_wait`. An empty list (scheduled
        modes only) says that every group of this step failed. Groups with no uses left leave the buffer. Raises
        LedgerError when a version is taken twice.
        """
        if version <= self._last_taken:
            raise LedgerError(f"the batch of version {version} was asked for after that of version {self._last_taken}.")
        if self._scheduled:
            chosen = self._choose_scheduled(version)
        else:
            chosen = self._choose_free(version, list(in_flight_versions))
        if chosen is None:
            return None
        self._last_taken = version
        return sorted(
            (self._use(item, p, version) for item, p in self._corrected(chosen)), key=lambda t: t.group.group_id
        )

    def check_batch(self, version: int, taken: Sequence[Taken]) -> None:
        """The last look before the loss: raise StaleBatchError for a rollout over the bound that nothing holds back."""
        for entry in taken:
            low, high = self._allowed_versions(entry, version)
            for info in (r.info for r in entry.group.rollouts):
                if not (low <= info.min_version and info.max_version <= high):
                    raise StaleBatchError(
                        f"rollout {info.rollout_id} with versions {info.min_version} to {info.max_version} was about "
                        f"to train at version {version}, where {low} to {high} are allowed."
                    )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able facts of the held groups and the RNG; the caller saves the payloads by rollout id."""
        return {
            "reserved": self._reserved,
            "arrivals": self._arrivals,
            "last_taken": self._last_taken,
            "closed": sorted(self._closed.items()),
            "rng": self._rng.bit_generator.state,
            "groups": [
                {
                    "group": group_to_json(item.group),
                    "arrival": item.arrival,
                    "scheduled_step": item.scheduled_step,
                    "uses": item.uses,
                }
                for item in self._groups.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], payloads: Mapping[int, Payload], version: int) -> None:
        """Restore. ``payloads`` by rollout id; ``version`` is the policy version of the checkpoint."""
        self._groups = {}
        for row in state["groups"]:
            group = group_from_json(row["group"], payloads)
            self._groups[group.group_id] = _Held(group, row["arrival"], row["scheduled_step"], row["uses"])
        self._closed = Counter(dict(state["closed"]))
        self._reserved, self._arrivals = state["reserved"], state["arrivals"]
        self._last_taken, self._resumed_at = state["last_taken"], version
        self._rng.bit_generator.state = state["rng"]
        if self.free < 0:
            raise LedgerError(
                f"the checkpoint's buffer does not fit: {-self.free} places over capacity {self.capacity}."
            )

    def _is_over(self, item: _Held, version: int) -> bool:
        if self._scheduled or self._over_stale == "downweight":
            return False
        if self._over_stale == "mask":
            return all(r.info.max_version < version - self._bound for r in item.group.rollouts)
        return item.group.staleness(version) > self._bound

    def _allowed_versions(self, entry: Taken, version: int) -> tuple[int, int]:
        """Versions that may reach the loss in this entry; from 0 where its mask or its weight holds old ones back."""
        oldest = version - self._bound
        if self._scheduled:
            return scheduled_versions(version, self._bound, self._resumed_at)
        masked = self._over_stale == "mask" and entry.masked_before_version >= oldest
        light = self._over_stale == "downweight" and entry.weight <= self._staleness_weight(entry.group, version)
        return (0 if masked or light else oldest), version

    def _staleness_weight(self, group: RolloutGroup, version: int) -> float:
        return min(1.0, (self._bound + 1) / (group.staleness(version) + 1))

    def _choose_scheduled(self, step: int) -> list[tuple[_Held, float]] | None:
        ready = [item for item in self._groups.values() if item.scheduled_step == step]
        if len(ready) + self._closed[step] < self._groups_per_step:
            return None
        del self._closed[step]
        return [(item, 1.0) for item in ready]

    def _choose_free(self, version: int, in_flight: list[int]) -> list[tuple[_Held, float]] | None:
        # By group id, so that a draw depends on what is held and not on the order in which it came.
        open_groups = [self._groups[i] for i in sorted(self._groups) if not self._is_over(self._groups[i], version)]
        urgent: list[_Held] = []
        if self._over_stale == "wait":
            if self.must_wait(version, in_flight):
                return None
            urgent = self._urgent(version, in_flight)
        if len(open_groups) < self._groups_per_step:
            return None
        rest = [item for item in open_groups if item not in urgent]
        measure = PRIORITY[self._config.priority]
        picked = CHOOSERS[self._config.sampling](
            [item.arrival for item in rest],
            [measure(item.group, version) for item in rest],
            self._groups_per_step - len(urgent),
            self._rng,
        )
        return [(item, 1.0) for item in urgent] + [(rest[i], p) for i, p in picked]

    def _urgent(self, version: int, in_flight: list[int]) -> list[_Held]:
        """Groups, oldest first, that must go now so that every later step can still meet the bound.

        The last look-ahead, over all that is in play, needs no choice: any full batch meets it.
        """
        unused = sorted(
            (i for i in self._groups.values() if i.uses == 0), key=lambda i: (i.group.min_version, i.arrival)
        )
        need = 0
        for steps_left in range(max(1, self._bound)):
            limit = version - self._bound + steps_left
            owed = sum(item.group.min_version <= limit for item in unused) + sum(v <= limit for v in in_flight)
            need = max(need, owed - steps_left * self._groups_per_step)
        late = [item.group.group_id for item in unused if self._is_over(item, version)]
        if late or need > self._groups_per_step:
            raise StaleBatchError(
                f"over_stale=wait cannot keep async.max_staleness={self._bound} at version {version}: "
                f"groups {late} are over it and {need} groups are due in a batch of {self._groups_per_step}."
            )
        return unused[:need]

    def _corrected(self, chosen: list[tuple[_Held, float]]) -> list[tuple[_Held, float]]:
        """Weights 1/p, the largest scaled to 1: prioritised replay only ever shrinks a gradient."""
        least = min((p for _, p in chosen), default=1.0)
        return [(item, least / p) for item, p in chosen]

    def _use(self, item: _Held, weight: float, version: int) -> Taken:
        item.uses += 1
        left = self._config.max_reuse - item.uses
        if left == 0:
            del self._groups[item.group.group_id]
        masked, free_running = 0, not self._scheduled
        if free_running and self._over_stale == "mask":
            masked = max(0, version - self._bound)
        if free_running and self._over_stale == "downweight":
            weight *= self._staleness_weight(item.group, version)
        return Taken(item.group, weight, masked, left)
