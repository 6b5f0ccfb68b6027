"""Admission: how many rollouts may start, so that each can still be consumed within the staleness bound.

Both gates count whole groups: a group that lost some siblings still takes one place of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.errors import StaleBatchError


class StalenessGate:
    """Free running: the places taken so far never exceed ``(replica_version + max_staleness + 1) * groups a step``.

    This bounds staleness because each step consumes one step's worth of places. At policy version v, after an admission
    on a replica that holds version h, at most ``(h + max_staleness + 1 - v)`` steps' worth of places are still owed;
    taken oldest first, the last of them is consumed at version ``h + max_staleness``. The replica's version counts, not
    the learner's: with ``weights.publish_every > 1`` the replica is behind, and its rollouts are as old as its weights.

    A group takes one place for each of its ``max_reuse`` trainings. ``steps`` ends admission when the run has enough
    groups; the last groups keep ``max_reuse`` places so that the last batch still finds enough different groups.

    With replay (``replay_groups`` of a batch, from step ``warmup_steps`` on) a group takes one place, for its first
    training. The places that replay fills never become free: for past batches and the present one their number is the
    buffer's count (:meth:`follow`), for later ones the planned number. A later batch that finds fewer groups to replay
    trains more fresh groups than planned, earlier than the bound requires, and ``follow`` gives those places back: so
    neither the bound nor the supply depends on how many groups replay finds. A smaller bound only closes admission
    until enough groups were trained or dropped. :meth:`pace` may close it earlier than the bound does, never later.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        *,
        num_generations: int = 1,
        max_reuse: int = 1,
        steps: int | None = None,
        replay_groups: int = 0,
        warmup_steps: int = 0,
    ) -> None:
        self._groups_per_step = batch_size // num_generations
        self._max_staleness = max_staleness
        self._replay_groups = replay_groups
        self._warmup_steps = warmup_steps
        self._version = 0
        self._replayed = 0
        self._num_generations = num_generations
        self._max_reuse = max_reuse
        self._steps = steps
        self._places = 0
        self._lead: int | None = None

    def room(self, replica_version: int) -> int:
        """Rollouts that may start on a replica that holds ``replica_version``, a multiple of ``num_generations``."""
        steps = replica_version + self._max_staleness + 1
        if self._steps is not None:
            steps = min(steps, self._steps + self._max_reuse - 1)
        planned = self._replay_groups * max(0, steps - max(self._version + 1, self._warmup_steps))
        free = steps * self._groups_per_step - self._replayed - planned - self._places
        if self._lead is not None:
            free = min(free, self._lead - self.ahead(replica_version + 1))
        return max(0, free // self._max_reuse) * self._num_generations

    def admit(self, replica_version: int) -> int | None:
        """Count one admitted group; returns the step that will train it, or None in a free run."""
        if self.room(replica_version) == 0:
            raise StaleBatchError(
                f"a group was admitted on a replica at version {replica_version} with all {self._places} places taken; "
                f"it could only be consumed over async.max_staleness={self._max_staleness}."
            )
        self._places += self._max_reuse
        return None

    def release(self, uses: int | None = None) -> None:
        """A group ended with ``uses`` of its trainings undone; None: all of them (it failed, or was dropped unused)."""
        self._places -= self._max_reuse if uses is None else uses

    def follow(self, version: int, replayed: int, max_staleness: int) -> None:
        """Set the learner's ``version``, the places that replay fills in all batches up to that version's
        (``replayed``), and the staleness up to which fresh rollouts are requested, at most the bound in force."""
        self._version, self._replayed, self._max_staleness = version, replayed, max_staleness

    def ahead(self, version: int) -> int:
        """Places taken in excess of those of the batches before ``version``."""
        return self._places - version * self._groups_per_step

    def rewind(self, consumed: int, owed: int) -> None:
        """The learner went back: its batches so far took ``consumed`` places; existing groups will take ``owed``."""
        self._places = consumed + owed

    def pace(self, lead: int | None) -> None:
        """Let replicas of version h begin at most ``lead`` groups beyond batch h; None: as many as the bound allows."""
        self._lead = lead

    def state_dict(self) -> dict[str, Any]:
        return {"places": self._places}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Restore; ``version`` is the policy version of the checkpoint."""
        self._places, self._version = state["places"], version


def scheduled_versions(step: int, lag: int, resumed_at: int) -> tuple[int, int]:
    """Lowest and highest version that the batch of ``step`` may contain under a fixed lag.

    Both are ``max(0, step - lag)``, except for the few batches that were unfinished at a resume at version
    ``resumed_at``: the old weights are gone, so the checkpoint's weights sample the rest of those.
    """
    target = max(0, step - lag)
    return target, max(target, resumed_at)


class LagGate:
    """Exact schedule: version ``max(0, t - lag)`` samples the whole batch of step t.

    Before replicas load version h + 1, all groups scheduled for version h must have been admitted (no :meth:`room` is
    left) and generated. A failed group frees no place: the batch of its step is smaller.
    """

    def __init__(self, batch_size: int, lag: int, *, num_generations: int = 1, steps: int | None = None) -> None:
        self._groups_per_step = batch_size // num_generations
        self._lag = lag
        self._num_generations = num_generations
        self._steps = steps
        self._admitted = 0
        self._resumed_at = 0

    def room(self, replica_version: int) -> int:
        steps = replica_version + self._lag + 1
        if self._steps is not None:
            steps = min(steps, self._steps)
        return max(0, steps * self._groups_per_step - self._admitted) * self._num_generations

    def admit(self, replica_version: int) -> int:
        step = self._admitted // self._groups_per_step
        low, high = scheduled_versions(step, self._lag, self._resumed_at)
        if self.room(replica_version) == 0 or not low <= replica_version <= high:
            raise StaleBatchError(
                f"a group for step {step} was admitted on a replica at version {replica_version}; a lag of "
                f"{self._lag} needs version {low}."
            )
        self._admitted += 1
        return step

    def release(self, uses: int | None = None) -> None:
        """Does nothing: the schedule does not shift."""

    def follow(self, version: int, replayed: int, max_staleness: int) -> None:
        """Does nothing: the schedule is fixed beforehand."""

    def state_dict(self) -> dict[str, Any]:
        return {"admitted": self._admitted}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        self._admitted, self._resumed_at = state["admitted"], version


Gate = StalenessGate | LagGate


def resolve_capacity(buffer: BufferConfig, config: AsyncConfig, batch_size: int) -> int:
    """Rollouts that the buffer may hold, including those in flight."""
    return buffer.capacity or 2 * (config.bound + 1) * batch_size


def build_gate(
    config: AsyncConfig, buffer: BufferConfig, *, batch_size: int, num_generations: int, steps: int | None
) -> Gate:
    """The gate of ``async.mode``."""
    if config.fixed_lag is not None:
        return LagGate(batch_size, config.fixed_lag, num_generations=num_generations, steps=steps)
    return StalenessGate(
        batch_size,
        buffer.admission_bound(config.bound),
        num_generations=num_generations,
        max_reuse=buffer.places,
        steps=steps,
        replay_groups=buffer.replay_groups(batch_size // num_generations),
        warmup_steps=buffer.warmup_steps,
    )
