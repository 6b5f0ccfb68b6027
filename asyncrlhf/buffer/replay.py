"""The bounded replay buffer: holds finished groups and decides which of them train at which version."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrlhf.buffer.admission import resolve_capacity, scheduled_versions
from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.records import group_from_json, group_to_json
from asyncrlhf.buffer.sampling import CHOOSERS, PRIORITY, correction, groups_due, must_wait, spread
from asyncrlhf.errors import LedgerError, StaleBatchError
from asyncrlhf.types import DropReason, Payload, RolloutGroup


@dataclass(frozen=True)
class Taken:
    """A group in a batch. ``weight`` multiplies the loss of its rollouts; ``uses_left`` 0 marks its last use;
    ``replayed`` one that was trained before."""

    group: RolloutGroup
    weight: float
    masked_before_version: int  # over_stale=mask: tokens older than this leave the loss
    uses_left: int
    replayed: bool = False


@dataclass(frozen=True)
class Evicted:
    """A group that left without its last use; ``uses_left`` is what the gate gets back: places not filled yet."""

    group: RolloutGroup
    reason: DropReason
    uses_left: int


@dataclass(eq=False)
class _Held:
    group: RolloutGroup
    arrival: int
    scheduled_step: int | None
    uses: int = 0


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
        self._bound = self._hard_bound = async_config.bound
        self._scheduled = async_config.fixed_lag is not None
        self._groups_per_step = batch_size // num_generations
        self._replay_groups = config.replay_groups(self._groups_per_step)
        self._num_generations = num_generations
        self.capacity = resolve_capacity(config, async_config, batch_size)
        self._groups: dict[int, _Held] = {}
        self._closed: Counter[int] = Counter()  # groups of a scheduled step that will never come
        self._reserved = 0
        self._arrivals = 0
        self._last_taken = -1
        self._replayed = 0
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
        if self._config.filter_zero_spread and spread(group) == 0.0:
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

    def set_bound(self, bound: int) -> None:
        """The staleness bound in force from now on; the one of the settings stays the highest."""
        self._bound = min(bound, self._hard_bound)

    def evict(self, version: int) -> list[Evicted]:
        """Remove what may not train at ``version`` or later: ``stale``. A scheduled mode and ``downweight`` keep all.

        ``drop`` removes groups over the bound; ``mask`` only those without one token inside it; ``wait`` only those
        that were trained before and wait for another use. With ``replay_fraction`` no trained group stays over
        ``max_age``, and trained groups leave, the one with the oldest token first, where they fill over half the
        buffer: fresh ones need the other half.
        """
        gone = [
            item
            for item in self._groups.values()
            if self._is_over(item, version) and (self._over_stale != "wait" or item.uses > 0)
        ]
        if self._config.replays:
            kept = sorted(self._trained(version), key=lambda i: (-i.group.min_version, -i.arrival))
            room = itertools.accumulate(
                (len(i.group) for i in kept), lambda left, n: left - n, initial=self.capacity // 2
            )
            gone += [item for item, left in zip(kept, itertools.islice(room, 1, None), strict=True) if left < 0]
        return self._remove(gone)

    def purge(self, version: int) -> list[Evicted]:
        """Remove every group with a token older than ``version``: ``stale``. A scheduled mode keeps all."""
        old = [item for item in self._groups.values() if item.group.min_version < version]
        return [] if self._scheduled else self._remove(old)

    def _remove(self, gone: list[_Held]) -> list[Evicted]:
        for item in gone:
            del self._groups[item.group.group_id]
        return [Evicted(item.group, "stale", max(0, self._config.places - item.uses)) for item in gone]

    def replayed_by(self, version: int) -> int:
        """Places that replay filled in all batches so far, with those it will fill in the batch of ``version``."""
        coming = 0 if version <= self._last_taken else min(self._due_replay(version), len(self._trained(version)))
        return self._replayed + coming

    def take(self, version: int, in_flight_versions: Iterable[int] = ()) -> list[Taken] | None:
        """The batch that moves the policy from ``version`` to ``version + 1``, by group id; None while it is not there.

        ``in_flight_versions``, read by ``over_stale=wait`` only, are those of ``waiting.must_wait``. An empty list
        (scheduled modes only) says that every group of this step failed. Groups with no uses left leave the buffer.
        Raises LedgerError when a version is taken twice.
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
        taken = [self._use(item, weight, version) for item, weight in chosen]
        self._replayed += sum(t.replayed for t in taken) if self._config.replays else 0
        return sorted(taken, key=lambda t: t.group.group_id)

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
            "replayed": self._replayed,
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
        self._replayed = state["replayed"]
        self._rng.bit_generator.state = state["rng"]
        if self.free < 0:
            raise LedgerError(
                f"the checkpoint's buffer does not fit: {-self.free} places over capacity {self.capacity}."
            )

    def _is_over(self, item: _Held, version: int) -> bool:
        """``wait`` measures an unused group by the bound of the settings: none was promised less when it began."""
        age, used = item.group.staleness(version), item.uses > 0
        if used and self._config.replays:
            return age > min(self._config.max_age or self._bound, self._bound)
        if self._scheduled or self._over_stale == "downweight":
            return False
        if self._over_stale == "mask":
            return all(r.info.max_version < version - self._bound for r in item.group.rollouts)
        return age > (self._hard_bound if self._over_stale == "wait" and not used else self._bound)

    def _allowed_versions(self, entry: Taken, version: int) -> tuple[int, int]:
        """Versions that may reach the loss in this entry; from 0 where its mask or its weight holds old ones back."""
        if self._scheduled:
            return scheduled_versions(version, self._hard_bound, self._resumed_at)
        oldest = version - (self._hard_bound if self._over_stale == "wait" else self._bound)
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
        """Groups with the weights that correct for how they were drawn."""
        # By group id, so that a draw depends on what is held and not on the order in which it came.
        open_groups = [self._groups[i] for i in sorted(self._groups) if not self._is_over(self._groups[i], version)]
        urgent: list[_Held] = []
        if self._over_stale == "wait":
            if must_wait(version, in_flight, self._bound, self._groups_per_step):
                return None
            urgent = self._urgent(version, in_flight)
        trained = self._trained(version)
        replayed = min(self._due_replay(version), len(trained), self._groups_per_step - len(urgent))
        rest = [i for i in open_groups if i not in urgent and not (self._config.replays and i.uses > 0)]
        count = self._groups_per_step - len(urgent) - replayed
        if len(rest) < count:
            return None
        sampling = "fifo" if self._config.replays else self._config.sampling
        fresh = [(item, 1.0) for item in urgent] + self._draw(sampling, rest, count, version)
        return self._corrected(fresh) + self._corrected(
            self._draw(self._config.sampling, trained, replayed, version) if replayed else []
        )

    def _draw(self, sampling: str, items: list[_Held], count: int, version: int) -> list[tuple[_Held, float]]:
        """``count`` of the items, each with the probability that it was to be drawn."""
        measure = PRIORITY[self._config.priority]
        picked = CHOOSERS[sampling](
            [item.arrival for item in items],
            [measure(item.group, version) for item in items],
            count,
            self._rng,
        )
        return [(items[i], p) for i, p in picked]

    def _due_replay(self, version: int) -> int:
        return self._replay_groups if version >= self._config.warmup_steps else 0

    def _trained(self, version: int) -> list[_Held]:
        """What may be replayed at ``version``, by group id."""
        if not self._config.replays:
            return []
        held = [self._groups[i] for i in sorted(self._groups)]
        return [item for item in held if item.uses > 0 and not self._is_over(item, version)]

    def _urgent(self, version: int, in_flight: list[int]) -> list[_Held]:
        """Groups, oldest first, that must go now so that every later step can still meet the bound. Those that a
        shrunken bound left behind go as early as batches allow, and never over the bound of the settings."""
        size = self._groups_per_step
        unused = sorted(
            (i for i in self._groups.values() if i.uses == 0), key=lambda i: (i.group.min_version, i.arrival)
        )
        begun = [item.group.min_version for item in unused] + in_flight
        need = groups_due(version, begun, self._hard_bound, size)
        late = [item.group.group_id for item in unused if self._is_over(item, version)]
        if late or need > size:
            raise StaleBatchError(
                f"over_stale=wait cannot keep async.max_staleness={self._hard_bound} at version {version}: "
                f"groups {late} are over it and {need} groups are due in a batch of {size}."
            )
        return unused[: min(size, max(need, groups_due(version, begun, self._bound, size)))]

    def _corrected(self, chosen: list[tuple[_Held, float]]) -> list[tuple[_Held, float]]:
        weights = correction([p for _, p in chosen], self._config.sampling_correction)
        return [(item, weight) for (item, _), weight in zip(chosen, weights, strict=True)]

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
        return Taken(item.group, weight, masked, left, replayed=item.uses > 1)
