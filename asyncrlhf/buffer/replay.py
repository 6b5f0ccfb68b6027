"""The bounded replay buffer: holds finished groups and chooses the batch for each version."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrlhf.buffer.admission import resolve_capacity, scheduled_versions
from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.held import HeldGroups, Standing, group_from_json, group_to_json
from asyncrlhf.buffer.sampling import PRIORITY, beyond, correction, groups_due, must_wait, priority, spread
from asyncrlhf.errors import LedgerError, StaleBatchError
from asyncrlhf.types import DropReason, Payload, RolloutGroup

SURPLUS = 9  # groups of equal rewards that are dropped at most, for each group of a batch: then they fill it


class ReplayBuffer:
    """Counts places by rollout: ``held + reserved <= capacity``; a place is reserved for each rollout in flight.

    The order of calls in the step of version v: :meth:`evict_stale`, :meth:`take`, :meth:`check_batch`. Deterministic:
    the same groups in the same order of arrival and the same seed give the same batches; ``uniform`` and priorities
    do not depend on the order of arrival.
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
        self._groups = HeldGroups(self._standing)
        self._closed: Counter[int] = Counter()  # groups of a scheduled step that will never come
        self._reserved = self._surplus = 0
        self._last_taken = -1
        self._batch: frozenset[int] = frozenset()  # ids of the groups that were taken last
        self._replayed = 0
        self._resumed_at = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))

    @property
    def held(self) -> int:
        """Finished rollouts in the buffer."""
        return self._groups.rollouts

    @property
    def reserved(self) -> int:
        """Places kept for rollouts in flight."""
        return self._reserved

    @property
    def free(self) -> int:
        return self.capacity - self.held - self._reserved

    def groups(self) -> list[RolloutGroup]:
        """The held groups by group id."""
        return sorted(self._groups, key=lambda group: group.group_id)

    def reserve(self, rollouts: int) -> None:
        """Reserve places for rollouts about to start; raises LedgerError if more than ``free``."""
        if rollouts > self.free:
            raise LedgerError(
                f"{rollouts} places were asked of the buffer, which has {self.free} of {self.capacity} free."
            )
        self._reserved += rollouts

    def release(self, rollouts: int) -> None:
        """Free the places of rollouts that failed or were dropped in flight."""
        if rollouts > self._reserved:
            raise LedgerError(
                f"{rollouts} places were given back to the buffer, but only {self._reserved} are reserved."
            )
        self._reserved -= rollouts

    def add(self, group: RolloutGroup) -> DropReason | None:
        """Put a finished group in the places reserved for it; returns None, or the reason of a refusal, which frees the
        places.

        Its ``scheduled_step`` is the result of the gate's ``admit``. A group lacks siblings only if they failed, and
        the caller has already released their places.
        """
        if not 1 <= len(group) <= self._num_generations or group.group_id in self._groups:
            raise LedgerError(f"group {group.group_id} with {len(group)} rollouts is empty, too large or held already.")
        step = group.scheduled_step
        if (step is not None) != self._scheduled:
            raise LedgerError(f"group {group.group_id} came with scheduled step {step} in the other kind of mode.")
        self.release(len(group))
        if self._config.filter_zero_spread and self._surplus < SURPLUS * self._groups_per_step and not spread(group):
            self._surplus += 1
            if step is not None:
                self.close_group(group.group_id, step)
            return "untrainable"
        self._groups.add(group)
        return None

    def close_group(self, group_id: int, scheduled_step: int) -> None:
        """The whole group failed: the batch of its step no longer waits for it."""
        if group_id in self._groups:
            raise LedgerError(f"group {group_id} is held and cannot be closed.")
        self._closed[scheduled_step] += 1

    def set_bound(self, bound: int) -> None:
        """Set the staleness bound in force; the settings' bound remains the maximum."""
        self._bound = min(bound, self._hard_bound)

    def evict_stale(self, version: int) -> list[RolloutGroup]:
        """Remove the groups that may not train at ``version`` or later. A scheduled mode and ``downweight`` keep all.

        ``drop`` removes groups over the bound; ``mask`` only those without a token inside it; ``wait`` only those that
        were trained before and wait for another use. With ``replay_fraction`` no trained group stays over ``max_age``,
        and when trained groups fill over half the buffer, those with the oldest token leave first, because fresh groups
        need the other half. The batch taken at ``version`` stays: its step is under way.
        """
        gone = self._all(version, "over", *(() if self._over_stale == "wait" else ("late",)))
        if self._config.replays:
            kept = sorted(reversed(self._all(version, "replay")), key=lambda group: -group.min_version)
            filled = itertools.accumulate(map(len, kept))
            gone += [group for group, places in zip(kept, filled, strict=True) if places > self.capacity // 2]
        under_way = self._batch if version <= self._last_taken else frozenset()
        return self._remove([group for group in gone if group.group_id not in under_way])

    def surplus(self, version: int, unfinished: Mapping[int, int]) -> set[int]:
        """Ids of groups that no order of training keeps inside the settings' bound, from ``version`` on; none under the
        bound that they began under. ``unfinished``: for each unfinished group, the version that it began with."""
        unused = {group.group_id: group.min_version for group in self._groups if group.uses == 0}
        return beyond(version, unused | dict(unfinished), self._hard_bound, self._groups_per_step)

    def discard(self, group_ids: Collection[int]) -> list[RolloutGroup]:
        """Remove the groups of ``group_ids`` that are held."""
        return self._remove([group for group in self._groups if group.group_id in group_ids])

    def purge(self, version: int) -> list[RolloutGroup]:
        """Remove every group with a token older than ``version``; a scheduled mode keeps all."""
        return [] if self._scheduled else self._remove([group for group in self._groups if group.min_version < version])

    def _remove(self, gone: list[RolloutGroup]) -> list[RolloutGroup]:
        """Remove groups; their ``uses_left`` are the places, not filled yet, that the gate gets back."""
        for group in gone:
            self._groups.remove(group)
        return [replace(group, uses_left=max(0, self._config.places - group.uses)) for group in gone]

    def replayed_by(self, version: int) -> int:
        """Places that replay filled in all batches so far and will fill in the batch of ``version``."""
        coming = 0 if version <= self._last_taken else self._to_replay(version)
        return self._replayed + coming

    def ready(self, version: int, in_flight_versions: Iterable[int] = ()) -> bool:
        """Whether :meth:`take` would return a batch, or raise. Changes nothing and does not visit every group."""
        if self._scheduled:
            return self._groups.of_step[version] + self._closed[version] >= self._groups_per_step
        counts = self._groups.counts(version, self._bound)
        enough = counts["open"] + self._to_replay(version) >= self._groups_per_step
        if self._over_stale != "wait" or not (enough or counts["late"]):
            return enough
        return not must_wait(version, in_flight_versions, self._bound, self._groups_per_step)

    def take(self, version: int, in_flight_versions: Iterable[int] = ()) -> list[RolloutGroup] | None:
        """The batch that moves the policy from ``version`` to ``version + 1``, ordered by group id; None while it is
        not complete.

        Its rollouts carry the weight and the mask that they train with. ``in_flight_versions`` is that of
        ``sampling.must_wait``, and only ``over_stale=wait`` uses it. An empty list (scheduled modes only): every group
        of this step failed. Groups with no uses left leave the buffer. Raises LedgerError when a version is taken
        twice.
        """
        if version <= self._last_taken:
            raise LedgerError(f"the batch of version {version} was requested after that of version {self._last_taken}.")
        if self._scheduled:
            chosen = self._choose_scheduled(version)
        else:
            chosen = self._choose_free(version, Counter(in_flight_versions))
        if chosen is None:
            return None
        self._last_taken, self._surplus = version, 0
        self._batch = frozenset(group.group_id for group, _ in chosen)
        taken = [self._use(group, weight, version) for group, weight in chosen]
        self._replayed += sum(group.replayed for group in taken) if self._config.replays else 0
        return sorted(taken, key=lambda group: group.group_id)

    def check_batch(self, version: int, taken: Sequence[RolloutGroup]) -> None:
        """The last check before the loss: raise StaleBatchError for an unweighted, unmasked rollout over the bound."""
        for group in taken:
            low, high = self._allowed_versions(group, version)
            for info in group.rollouts:
                if not (low <= info.min_version and info.max_version <= high):
                    raise StaleBatchError(
                        f"rollout {info.rollout_id} with versions {info.min_version} to {info.max_version} was about "
                        f"to train at version {version}, where {low} to {high} are allowed."
                    )

    def rewind(self, version: int, replayed: int, untrained: Iterable[RolloutGroup], uses: Mapping[int, int]) -> None:
        """The learner went back to ``version``, before whose batch replay had filled ``replayed`` places.
        ``untrained``: groups that return, before all others; ``uses``: trainings that still count, by rollout id,
        default 0."""
        groups = {group.group_id: group for group in (*untrained, *self._groups)}
        self._remove(list(self._groups))
        for group in groups.values():
            rollouts = tuple(r.in_batch() for r in group.rollouts)
            used = uses.get(rollouts[0].rollout_id, 0)
            self._groups.add(replace(group, rollouts=rollouts, uses=used, uses_left=0))
        self._last_taken, self._replayed = version - 1, replayed

    def owed(self) -> int:
        """Places that the held groups will still fill."""
        return sum(max(0, self._config.places - group.uses) for group in self._groups)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able facts of the held groups and the RNG; the caller saves the payloads by rollout id."""
        return {
            "reserved": self._reserved,
            "surplus": self._surplus,
            "last_taken": self._last_taken,
            "replayed": self._replayed,
            "closed": sorted(self._closed.items()),
            "rng": self._rng.bit_generator.state,
            "groups": [group_to_json(group) for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any], payloads: Mapping[int, Payload], version: int) -> None:
        """Restore. ``payloads`` by rollout id; ``version`` is the policy version of the checkpoint. Groups beyond a
        smaller ``capacity`` stay: no rollout begins (``free`` is negative) until enough are trained or dropped."""
        self._groups = HeldGroups(self._standing)
        for row in state["groups"]:
            self._groups.add(group_from_json(row, payloads))
        self._closed = Counter(dict(state["closed"]))
        self._reserved, self._replayed, self._surplus = state["reserved"], state["replayed"], state.get("surplus", 0)
        self._last_taken, self._resumed_at = state["last_taken"], version
        self._rng.bit_generator.state = state["rng"]

    def _standing(self, group: RolloutGroup, version: int, bound: int) -> Standing:
        if self._is_over(group, version, bound):
            return "over" if group.uses else "late"
        return "replay" if self._config.replays and group.uses else "open"

    def _is_over(self, group: RolloutGroup, version: int, bound: int) -> bool:
        """Whether the group is over the bound. Under ``wait`` an unused group is measured by the settings' bound."""
        age, used = group.staleness(version), group.uses > 0
        if used and self._config.replays:
            return age > min(self._config.max_age or bound, bound)
        if self._scheduled or self._over_stale == "downweight":
            return False
        if self._over_stale == "mask":
            return all(r.max_version < version - bound for r in group.rollouts)
        return age > (self._hard_bound if self._over_stale == "wait" and not used else bound)

    def _allowed_versions(self, group: RolloutGroup, version: int) -> tuple[int, int]:
        """Versions that the loss may see in this group; from 0 if a mask or a weight covers old ones."""
        if self._scheduled:
            return scheduled_versions(version, self._hard_bound, self._resumed_at)
        oldest = version - (self._hard_bound if self._over_stale == "wait" else self._bound)
        first = group.rollouts[0]
        masked = self._over_stale == "mask" and first.masked_before_version >= oldest
        light = self._over_stale == "downweight" and first.weight <= self._staleness_weight(group, version)
        return (0 if masked or light else oldest), version

    def _staleness_weight(self, group: RolloutGroup, version: int) -> float:
        return min(1.0, (self._bound + 1) / (group.staleness(version) + 1))

    def _choose_scheduled(self, step: int) -> list[tuple[RolloutGroup, float]] | None:
        ready = [group for group in self._groups if group.scheduled_step == step]
        if len(ready) + self._closed[step] < self._groups_per_step:
            return None
        del self._closed[step]
        return [(group, 1.0) for group in ready]

    def _choose_free(self, version: int, in_flight: Counter[int]) -> list[tuple[RolloutGroup, float]] | None:
        """Choose groups, with the weights that correct for the probability of drawing them."""
        urgent: list[RolloutGroup] = []
        if self._over_stale == "wait":
            if must_wait(version, in_flight, self._bound, self._groups_per_step):
                return None
            urgent = self._urgent(version, in_flight)
        replayed = min(self._to_replay(version), self._groups_per_step - len(urgent))
        first = {group.group_id for group in urgent}
        rest = [group for group in self._all(version, "open") if group.group_id not in first]
        count = self._groups_per_step - len(urgent) - replayed
        if len(rest) < count:
            return None
        sampling = "fifo" if self._config.replays else self._config.sampling
        fresh = [(group, 1.0) for group in urgent] + self._draw(sampling, rest, count, version)
        return self._corrected(fresh) + self._corrected(
            self._draw(self._config.sampling, self._all(version, "replay"), replayed, version) if replayed else []
        )

    def _draw(
        self, sampling: str, groups: list[RolloutGroup], count: int, version: int
    ) -> list[tuple[RolloutGroup, float]]:
        """``count`` of the groups, given in the order of arrival, each with its probability of being drawn."""
        if sampling in ("fifo", "lifo"):
            return [(group, 1.0) for group in (groups if sampling == "fifo" else groups[::-1])[:count]]
        # By group id, so that a draw depends on the held groups and not on their order of arrival.
        groups = sorted(groups, key=lambda group: group.group_id)
        if sampling == "uniform":
            return [(groups[i], 1.0) for i in self._rng.permutation(len(groups))[:count]]
        measure = PRIORITY[sampling]
        picked = priority([measure(group, version) for group in groups], count, self._rng)
        return [(groups[i], p) for i, p in picked]

    def _to_replay(self, version: int) -> int:
        """Groups of the batch at ``version`` that come from replay: the planned number, or fewer if fewer are held."""
        due = self._replay_groups if version >= self._config.warmup_steps else 0
        return min(due, self._groups.counts(version, self._bound)["replay"])

    def _all(self, version: int, *standings: Standing) -> list[RolloutGroup]:
        """The groups with one of these standings, in the order of arrival."""
        return [group for group in self._groups if self._standing(group, version, self._bound) in standings]

    def _urgent(self, version: int, in_flight: Counter[int]) -> list[RolloutGroup]:
        """Groups, oldest first, that must train now so that every later step can meet the bound. Groups over a bound
        that became smaller train as early as batches allow, and never over the settings' bound."""
        size = self._groups_per_step
        unused = sorted((g for g in self._groups if g.uses == 0), key=lambda group: group.min_version)
        begun = Counter(group.min_version for group in unused) + in_flight
        need = groups_due(version, begun, self._hard_bound, size)
        late = [group.group_id for group in unused if self._is_over(group, version, self._bound)]
        if late or need > size:
            raise StaleBatchError(
                f"over_stale=wait cannot keep async.max_staleness={self._hard_bound} at version {version}: "
                f"groups {late} are over it and {need} groups are due in a batch of {size}."
            )
        return unused[: min(size, max(need, groups_due(version, begun, self._bound, size)))]

    def _corrected(self, chosen: list[tuple[RolloutGroup, float]]) -> list[tuple[RolloutGroup, float]]:
        weights = correction([p for _, p in chosen], self._config.sampling_correction)
        return [(group, weight) for (group, _), weight in zip(chosen, weights, strict=True)]

    def _use(self, group: RolloutGroup, weight: float, version: int) -> RolloutGroup:
        used = self._groups.use(group)
        left = self._config.max_reuse - used.uses
        if left == 0:
            self._groups.remove(used)
        masked, free_running = 0, not self._scheduled
        if free_running and self._over_stale == "mask":
            masked = max(0, version - self._bound)
        if free_running and self._over_stale == "downweight":
            weight *= self._staleness_weight(group, version)
        if weight != 1.0 or masked:
            rollouts = tuple(r.in_batch(weight, masked) for r in group.rollouts)
            used = replace(used, rollouts=rollouts)
        return replace(used, uses_left=left)
