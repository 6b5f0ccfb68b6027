"""Turns rollouts that reached their end into record rows, which are written beside the run, in order, none lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial

from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import LONG_SECONDS, Runtime, within
from asyncrlhf.orchestrator.spans import SpanLog
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.records.record_marker import RecordMarker
from asyncrlhf.records.recorder import MAX_WAITING, RunRecorder
from asyncrlhf.records.rollout_rows import RolloutRow
from asyncrlhf.types import Payload, RolloutGroup, RolloutInfo


class RolloutLog:
    """Keeps the uses of rollouts that may be trained again, and records each rollout once, when it has ended. It passes
    references on; the runtime's record writer fetches the arrays behind them."""

    def __init__(self, state: RunState, runtime: Runtime, recorder: RunRecorder) -> None:
        self._state = state
        self._recorder = recorder
        self._uses: dict[int, tuple[tuple[int, ...], float]] = {}  # by rollout id: the versions, the last time
        self._rows: list[RolloutRow] = []
        self._payloads: list[Payload | None] = []
        recorder.write_with(runtime.write_part)
        self._spans = SpanLog(state, recorder)
        if state.config.logging.spans:
            runtime.told = self._spans.hear
            recorder.before_closing(self._spans.step)

    def begin(self) -> None:
        """The learner's loop begins: from here on the timeline is recorded."""
        self._spans.begin()

    def discard(self, rollout_id: int, group_id: int, info: RolloutInfo | None, state: str, reason: str) -> None:
        """A rollout that will never train (again); the row goes out with the next :meth:`hand_over`."""
        group = self._state.groups.get(group_id)
        used = rollout_id in self._uses
        row = RolloutRow(
            rollout_id,
            group_id,
            prompt=group.prompt.text if group is not None else "",
            state="trained" if used else state,
            admitted_at=group.admitted_at if group is not None else 0.0,
            drop_reason=None if used else reason,
            epoch=group.epoch if group is not None else 0,
        )
        self._end(row, info)

    def used(self, taken: Sequence[RolloutGroup], version: int) -> None:
        """A batch was consumed at ``version``; what had its last use has ended."""
        now = self._state.now()
        for group in taken:
            for info in group.rollouts:
                versions, _ = self._uses.get(info.rollout_id, ((), 0.0))
                self._uses[info.rollout_id] = ((*versions, version), now)
                if not group.uses_left:
                    self._end(RolloutRow(info.rollout_id, info.group_id, "", "trained", info.admitted_at), info)

    def _end(self, row: RolloutRow, info: RolloutInfo | None) -> None:
        """Keep the row with all that is known here; prompt, response and arrays come from the payload."""
        if info is not None:
            row.generator_id, row.generated_at, row.admitted_at = info.generator_id, info.generated_at, info.admitted_at
            row.epoch = info.epoch
            if info.scored_at is not None:
                row.reward, row.scored_at, row.extra = info.reward, info.scored_at, info.extra or None
        if row.rollout_id in self._uses:
            row.consumed_at_version, row.consumed_at = self._uses.pop(row.rollout_id)
            row.staleness = info.staleness(row.consumed_at_version[-1]) if info is not None else None
        self._rows.append(row)
        self._payloads.append(info.payload if info is not None else None)

    def _record(self) -> None:
        self._recorder.record(self._rows, self._payloads)
        self._rows, self._payloads = [], []

    async def hand_over(self) -> None:
        """Send what has ended on its way to the records; waits only when those are far behind."""
        self._state.journal.mark()
        self._record()
        self._spans.step()
        await self._written(self._recorder.unwritten(MAX_WAITING))

    async def rewind(self, marker: RecordMarker) -> None:
        """Undo the records of rollouts and steps after ``marker``."""
        await off_loop(partial(self._recorder.rewind, marker))
        self._rows, self._payloads = [], []

    def uses_before(self, version: int, returned: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
        """Forget the uses at ``version`` and later of what is held, ``returned`` with its uses among it; how many are
        left, by rollout id."""
        held = self._uses | {i: (versions, 0.0) for i, versions in returned.items()}
        kept = {i: (tuple(at for at in versions if at < version), now) for i, (versions, now) in held.items()}
        self._uses = {i: (versions, now) for i, (versions, now) in kept.items() if versions}
        return {i: len(versions) for i, (versions, _) in self._uses.items()}

    async def undo_training(self, marker: RecordMarker, version: int, returned: Collection[int]) -> None:
        """Undo the records of steps after ``marker``, in the rows since then the uses at ``version`` and later, and the
        rows of what ``returned``."""
        self.mark()
        await self.flush()
        await off_loop(partial(self._recorder.undo_training, marker, version, returned))

    def mark(self) -> RecordMarker:
        """Where the records stand with all that has ended; they are on disk after :meth:`flush`."""
        self._record()
        self._spans.step()
        return self._recorder.mark()

    async def flush(self) -> None:
        """Wait until all that was marked is on disk."""
        await self._written(self._recorder.unwritten())
        await off_loop(self._recorder.sync_metrics)

    async def _written(self, parts: Sequence[Future[None]]) -> None:
        if parts:
            await within(LONG_SECONDS, "the record writer", "write", off_loop(lambda: wait(parts)))
        self._recorder.raise_if_failed()

    def uses(self) -> dict[int, list[int]]:
        """Versions at which rollouts that are still held were trained, for a checkpoint."""
        return {rollout_id: list(versions) for rollout_id, (versions, _) in self._uses.items()}

    def restore_uses(self, uses: dict[int, list[int]]) -> None:
        self._uses = {rollout_id: (tuple(versions), 0.0) for rollout_id, versions in uses.items()}
