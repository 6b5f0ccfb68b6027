"""Reading ahead as one kind of annotators does it: what it asks of the run's state."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.readahead.owners import ReadAhead, ReaderHandle, ReadTotals


def reading_ahead(state: RunState, kind: str, workers: Sequence[ReaderHandle], totals: ReadTotals) -> ReadAhead:
    """The :class:`ReadAhead` of the annotators of ``kind``."""

    def group_of(rollout_id: int) -> GroupInProgress | None:
        return state.groups.get(rollout_id // state.config.num_generations)

    def under_way(rollout_id: int) -> bool:
        group = group_of(rollout_id)
        return group is not None and rollout_id in group.unfinished

    def wanted(rollout_id: int) -> bool:
        group = group_of(rollout_id)
        if group is None or rollout_id not in group.unscored:
            return False
        return rollout_id not in group.annotations[kind]

    return ReadAhead(f"The {kind} model", workers, under_way, wanted, totals, state.message, state.queue.notify)
