"""Turns rollouts that reached their end into record rows, which are written beside the run, in order, none lost."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.records.recorder import MAX_WAITING, RecordMarker, RolloutRow, RunRecorder
from asyncrlhf.types import Payload, RolloutGroup, RolloutInfo


@dataclass
class _Use:
    versions: list[int] = field(default_factory=list)
    last_at: float = 0.0


class RolloutLog:
    """Keeps the uses of rollouts that may be trained again, and records each rollout once, when it has ended. It passes
    references on; the runtime's record writer fetches the arrays behind them."""

    def __init__(self, state: RunState, runtime: Runtime, recorder: RunRecorder) -> None:
        self._state = state
        self._recorder = recorder
        self._uses: dict[int, _Use] = {}
        self._rows: list[RolloutRow] = []
        self._payloads: list[Payload | None] = []
        recorder.write_with(runtime.write_part)

    def discard(self, rollout_id: int, group_id: int, info: RolloutInfo | None, state: str, reason: str) -> None:
        """A rollout that will never train (again); the row goes out with the next :meth:`hand_over`."""
        group = self._state.groups.get(group_id)
        use = self._uses.pop(rollout_id, _Use())
        row = RolloutRow(
            rollout_id,
            group_id,
            prompt=group.prompt.text if group is not None else "",
            state="trained" if use.versions else state,
            admitted_at=group.admitted_at if group is not None else 0.0,
            drop_reason=None if use.versions else reason,
        )
        self._end(row, info, use)

    def used(self, taken: Sequence[RolloutGroup], version: int) -> None:
        """A batch was consumed at ``version``; what had its last use has ended."""
        now = self._state.now()
        for group in taken:
            for info in group.rollouts:
                use = self._uses.setdefault(info.rollout_id, _Use())
                use.versions.append(version)
                use.last_at = now
                if group.uses_left:
                    continue
                del self._uses[info.rollout_id]
                row = RolloutRow(info.rollout_id, info.group_id, "", "trained", info.admitted_at)
                self._end(row, info, use)

    def _end(self, row: RolloutRow, info: RolloutInfo | None, use: _Use) -> None:
        """Keep the row with all that is known here; prompt, response and arrays come from the payload."""
        if info is not None:
            row.generator_id, row.generated_at, row.admitted_at = info.generator_id, info.generated_at, info.admitted_at
            if info.scored_at is not None:
                row.reward, row.scored_at = info.reward, info.scored_at
        if use.versions:
            row.consumed_at_version, row.consumed_at = tuple(use.versions), use.last_at
            row.staleness = info.staleness(use.versions[-1]) if info is not None else None
        self._rows.append(row)
        self._payloads.append(info.payload if info is not None else None)

    def _record(self) -> None:
        self._recorder.record(self._rows, self._payloads)
        self._rows, self._payloads = [], []

    async def hand_over(self) -> None:
        """Send what has ended on its way to the records; waits only when those are far behind."""
        self._record()
        await self._written(self._recorder.unwritten(MAX_WAITING))

    def mark(self) -> RecordMarker:
        """Where the records stand with all that has ended; they are on disk after :meth:`flush`."""
        self._record()
        return self._recorder.mark()

    async def flush(self) -> None:
        """Wait until all that was marked is on disk."""
        await self._written(self._recorder.unwritten())
        await off_loop(self._recorder.sync_metrics)

    async def _written(self, parts: Sequence[Future[None]]) -> None:
        if parts:
            await off_loop(lambda: wait(parts))
        self._recorder.raise_if_failed()

    def uses(self) -> dict[int, list[int]]:
        """Versions at which rollouts that are still held were trained, for a checkpoint."""
        return {rollout_id: use.versions for rollout_id, use in self._uses.items()}

    def restore_uses(self, uses: dict[int, list[int]]) -> None:
        self._uses = {rollout_id: _Use(list(versions)) for rollout_id, versions in uses.items()}
