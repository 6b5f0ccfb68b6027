"""Turns rollouts that reached their end into record rows: fetches their arrays beside the run, in order, none lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from asyncrlhf.buffer.replay import Taken
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.orchestrator.state import RunState
from asyncrlhf.records.recorder import RolloutRow, RunRecorder
from asyncrlhf.types import Payload, Prompt, Rollout, RolloutInfo, ScoredRollout

MAX_BEHIND = 64  # batches of rows whose arrays are still to be fetched; beyond, the run waits for its records


@dataclass
class _Use:
    versions: list[int] = field(default_factory=list)
    last_at: float = 0.0


@dataclass(frozen=True)
class _Ended:
    """A rollout at its end; ``facts`` is None when it never left its generator."""

    rollout_id: int
    group_id: int
    prompt: Prompt | None
    admitted_at: float
    facts: RolloutInfo | None
    scored: ScoredRollout | None
    state: str
    reason: str | None
    use: _Use


class RolloutLog:
    """Keeps the uses of rollouts that may be trained again, and writes each rollout once, when it has ended."""

    def __init__(self, state: RunState, runtime: Runtime, recorder: RunRecorder) -> None:
        self._state = state
        self._runtime = runtime
        self._recorder = recorder
        self._uses: dict[int, _Use] = {}
        self._queue: asyncio.Queue[list[_Ended]] = asyncio.Queue(MAX_BEHIND)
        self._ended: list[_Ended] = []
        self._unwritten = 0  # batches in the queue or on their way to the recorder

    def discard(
        self, rollout_id: int, group_id: int, facts: ScoredRollout | RolloutInfo | None, state: str, reason: str
    ) -> None:
        """A rollout that will never train (again); the row goes out with the next :meth:`hand_over`."""
        scored = facts if isinstance(facts, ScoredRollout) else None
        info = scored.info if scored is not None else facts if isinstance(facts, RolloutInfo) else None
        group = self._state.groups.get(group_id)
        use = self._uses.pop(rollout_id, _Use())
        admitted_at = scored.admitted_at if scored is not None else group.admitted_at if group is not None else 0.0
        self._ended.append(
            _Ended(
                rollout_id,
                group_id,
                group.prompt if group is not None else None,
                admitted_at,
                info,
                scored,
                "trained" if use.versions else state,
                None if use.versions else reason,
                use,
            )
        )

    def used(self, taken: Sequence[Taken], version: int) -> None:
        """A batch was consumed at ``version``; what had its last use has ended."""
        now = self._state.now()
        for item in taken:
            for scored in item.group.rollouts:
                info = scored.info
                use = self._uses.setdefault(info.rollout_id, _Use())
                use.versions.append(version)
                use.last_at = now
                if item.uses_left:
                    continue
                del self._uses[info.rollout_id]
                at = scored.admitted_at
                self._ended.append(_Ended(info.rollout_id, info.group_id, None, at, info, scored, "trained", None, use))

    async def hand_over(self) -> None:
        """Send what has ended on its way to the recorder; waits only when the records are far behind."""
        ended, self._ended = self._ended, []
        self._unwritten += 1
        await self._queue.put(ended)

    def uses(self) -> dict[int, list[int]]:
        """Versions at which rollouts that are still held were trained, for a checkpoint."""
        return {rollout_id: use.versions for rollout_id, use in self._uses.items()}

    def restore_uses(self, uses: dict[int, list[int]]) -> None:
        self._uses = {rollout_id: _Use(list(versions)) for rollout_id, versions in uses.items()}

    async def run(self) -> None:
        """Fetch and write, for as long as the run goes."""
        while True:
            ended = await self._queue.get()
            await self._write(ended)
            self._unwritten -= 1
            self._queue.task_done()

    @property
    def behind(self) -> bool:
        """Whether something that ended has not reached the recorder."""
        return bool(self._ended) or self._unwritten > 0

    async def flush(self) -> None:
        """Wait until everything so far is with the recorder."""
        ended, self._ended = self._ended, []
        await self._queue.join()
        await self._write(ended)

    async def _write(self, ended: list[_Ended]) -> None:
        if not self._state.config.logging.rollouts:
            return  # nobody reads the arrays, so they are not fetched either
        payloads: list[Payload] = [replace(e.facts.payload, annotations=()) for e in ended if e.facts is not None]
        arrays = {r.rollout_id: r for r in await self._runtime.fetch(payloads)} if payloads else {}
        self._recorder.record([self._row(e, arrays) for e in ended])

    def _row(self, e: _Ended, arrays: dict[int, Rollout]) -> RolloutRow:
        rollout = arrays.get(e.rollout_id)
        prompt = rollout.prompt if rollout is not None else e.prompt
        last = e.use.versions[-1] if e.use.versions else None
        return RolloutRow(
            rollout_id=e.rollout_id,
            group_id=e.group_id,
            prompt=prompt.text if prompt is not None else "",
            state=e.state,
            admitted_at=e.admitted_at,
            response=rollout.response_text if rollout is not None else None,
            reward=e.scored.reward if e.scored is not None else None,
            policy_versions=rollout.policy_versions if rollout is not None else (),
            behavior_logprobs=rollout.behavior_logprobs if rollout is not None else (),
            consumed_at_version=tuple(e.use.versions),
            staleness=e.scored.staleness(last) if e.scored is not None and last is not None else None,
            drop_reason=e.reason,
            generator_id=e.facts.generator_id if e.facts is not None else None,
            generated_at=e.facts.generated_at if e.facts is not None else None,
            scored_at=e.scored.scored_at if e.scored is not None else None,
            consumed_at=e.use.last_at if e.use.versions else None,
        )
