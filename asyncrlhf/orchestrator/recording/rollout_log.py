"""Records each rollout once, when it has ended: rows are written in the background, in order, and none is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from asyncrlhf.cluster.clock import off_loop
from asyncrlhf.cluster.handles import LONG_SECONDS, RECORD_WRITER, Runtime, within
from asyncrlhf.orchestrator.recording.spans import SpanLog
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.records.write.record_marker import RecordMarker
from asyncrlhf.records.write.recorder import MAX_WAITING, RunRecorder
from asyncrlhf.records.write.rollout_rows import RolloutRow
from asyncrlhf.types import Payload, RolloutGroup, RolloutInfo


class RolloutLog:
    """Keeps the trainings of rollouts that may be trained again, and records each rollout when it has ended. It passes
    references on; the runtime's record writer fetches the arrays behind them."""

    def __init__(self, state: RunState, runtime: Runtime, recorder: RunRecorder) -> None:
        self._state = state
        self._runtime = runtime
        self._recorder = recorder
        self._uses: dict[int, tuple[tuple[int, ...], float]] = {}  # by rollout id: the versions, the last time
        self._rows: list[RolloutRow] = []
        self._payloads: list[Payload | None] = []
        recorder.write_with(runtime.write_part)
        self._spans = SpanLog(state, recorder)
        runtime.told = self._spans.hear
        recorder.before_closing(self._spans.step)

    def begin(self) -> None:
        """Call it when the learner's loop begins: the timeline is recorded from then on."""
        self._spans.begin()

    def discard(self, rollout_id: int, group_id: int, info: RolloutInfo | None, state: str, reason: str) -> None:
        """Record a rollout that will not train (again); the next :meth:`hand_over` sends its row."""
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
        """Record that a batch was trained at ``version``; rollouts without uses left have ended."""
        now = self._state.now()
        for group in taken:
            for info in group.rollouts:
                versions, _ = self._uses.get(info.rollout_id, ((), 0.0))
                self._uses[info.rollout_id] = ((*versions, version), now)
                if not group.uses_left:
                    self._end(RolloutRow(info.rollout_id, info.group_id, "", "trained", info.admitted_at), info)

    def _end(self, row: RolloutRow, info: RolloutInfo | None) -> None:
        """Complete the row from ``info`` and the known uses; the writer adds text and arrays from the payload."""
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
        """Send the rows of ended rollouts to the record writer; waits only if many earlier ones are unwritten."""
        self._state.journal.mark()
        self._record()
        self._spans.step()
        await self._written(self._recorder.unwritten(MAX_WAITING))

    async def rewind(self, marker: RecordMarker) -> None:
        """Delete the records of rollouts and steps after ``marker``."""
        await off_loop(partial(self._recorder.rewind, marker))
        self._rows, self._payloads = [], []

    def uses_before(self, version: int, returned: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
        """Forget the trainings at ``version`` and later of the rollouts held, to which ``returned`` adds its own by
        rollout id. Returns how many trainings are left, by rollout id."""
        held = self._uses | {i: (versions, 0.0) for i, versions in returned.items()}
        kept = {i: (tuple(at for at in versions if at < version), now) for i, (versions, now) in held.items()}
        self._uses = {i: (versions, now) for i, (versions, now) in kept.items() if versions}
        return {i: len(versions) for i, (versions, _) in self._uses.items()}

    async def undo_training(self, marker: RecordMarker, version: int, returned: Collection[int]) -> None:
        """Delete the records of steps after ``marker`` and the rows of the ``returned`` rollouts, and from later rows
        the trainings at ``version`` and later."""
        self.mark()
        await self.flush()
        await off_loop(partial(self._recorder.undo_training, marker, version, returned))

    def mark(self) -> RecordMarker:
        """The position of the records with all ended rollouts; they are on disk after :meth:`flush`."""
        self._record()
        self._spans.step()
        return self._recorder.mark()

    async def flush(self) -> None:
        """Wait until all records up to the last mark are on disk."""
        await self._written(self._recorder.unwritten())
        await off_loop(self._recorder.sync_metrics)

    async def _written(self, parts: Sequence[Future[None]]) -> None:
        if parts:
            await self.written(parts)
        self._recorder.raise_if_failed()

    async def written(self, files: Sequence[Future[None]]) -> None:
        """Wait until the record writer has written these files, or failed to."""
        await within(LONG_SECONDS, RECORD_WRITER, "write", self._runtime.written(files, self._state.message))

    def uses(self) -> dict[int, list[int]]:
        """For a checkpoint: the versions at which the rollouts still held were trained."""
        return {rollout_id: list(versions) for rollout_id, (versions, _) in self._uses.items()}

    def restore_uses(self, uses: dict[int, list[int]]) -> None:
        self._uses = {rollout_id: (tuple(versions), 0.0) for rollout_id, versions in uses.items()}
