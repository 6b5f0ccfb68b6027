"""From single finished rollouts to whole scored groups in the buffer; failures and drops are filed here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.redaction import redact
from asyncrlhf.types import Annotation, DropReason, RolloutGroup, RolloutInfo

Discard = Callable[[int, int, RolloutInfo | None, str, str], None]


class Assembly:
    """Updates ledger, gate, buffer and groups together. ``discard(rollout_id, group_id, facts, state, reason)`` records
    a rollout that will never train; ``source`` hears what the answers to its prompts earned."""

    def __init__(self, state: RunState, discard: Discard, source: PromptSource) -> None:
        self._state, self._discard, self._source = state, discard, source
        self._outcomes: deque[bool | None] = deque(maxlen=state.config.batch_size)
        self._failures_told = 0
        served = {"reference": state.config.reference_served, "critic": state.config.critic_served}
        self._kinds = ["reward", *(kind for kind, is_served in served.items() if is_served)]  # that a rollout waits for

    def generated(self, info: RolloutInfo) -> bool:
        """File a finished rollout; returns False if its group was dropped, or the rollout issued again, meanwhile."""
        group = self._state.groups.get(info.group_id)
        if group is None or info.rollout_id not in group.unfinished or info.epoch < group.epoch:
            return False
        group.unfinished.discard(info.rollout_id)
        group.newest = max(group.newest, info.max_version)
        self._state.ledger.finish_generation(info.rollout_id)
        # In the scheduled modes the version that the schedule has the generators at, which unlike the clock is the same
        # in every run.
        info.finished_at_version = info.max_version if self._state.scheduled else self._state.version
        info.admitted_at = group.admitted_at
        return True

    def awaits(self, info: RolloutInfo) -> bool:
        """Whether the rollout's group still waits for it: it is not complete, failed, dropped or issued again."""
        group = self._state.groups.get(info.group_id)
        return group is not None and info.rollout_id in group.unscored and info.epoch >= group.epoch

    def annotated(self, kind: str, info: RolloutInfo, annotation: Annotation) -> None:
        """File the annotation, or the failure, that a worker of this kind returned. The kinds answer in any order; the
        rollout is complete when all have answered."""
        if not self.awaits(info):
            return
        if annotation.reward is None and annotation.arrays is None:
            error = annotation.error or f"the {kind} worker gave nothing"
            self.failed(info.rollout_id, info.group_id, error, info, judged=not annotation.abstained)
            return
        group = self._state.groups[info.group_id]
        group.annotations[kind][info.rollout_id] = (annotation, self._state.now())
        if all(info.rollout_id in group.annotations[kind] for kind in self._kinds):
            self._complete(group, info)

    def _complete(self, group: GroupInProgress, info: RolloutInfo) -> None:
        """Complete the rollout: its payload now also says where the annotations' arrays lie."""
        rollout_id = info.rollout_id
        given = {kind: group.annotations[kind].pop(rollout_id) for kind in self._kinds}
        times = {kind: at for kind, (_, at) in given.items()}
        score, _ = given["reward"]
        assert score.reward is not None, "an annotation without arrays has a reward"
        arrays = tuple(annotation.arrays for annotation, _ in given.values() if annotation.arrays is not None)
        if arrays:
            info.payload = replace(info.payload, annotations=arrays)
        info.reward, info.reward_parts = score.reward, dict(score.parts)
        info.logged, info.extra = {**info.logged, **score.logged}, score.extra
        info.scored_at, info.referenced_at, info.valued_at = (
            times.get(kind) for kind in ("reward", "reference", "critic")
        )
        self._outcomes.append(True)
        self._state.ledger.buffer(rollout_id)
        group.unscored.discard(rollout_id)
        group.scored.append(info)
        self._close_if_done(group)

    def failed(
        self, rollout_id: int, group_id: int, error: str, facts: RolloutInfo | None, judged: bool = True
    ) -> None:
        """Count one failed rollout; too many of them end the run with the last cause. A rollout that no reward could
        judge (``judged=False``) is dropped as untrainable instead."""
        group = self._state.groups.get(group_id)
        if group is None or rollout_id not in group.unscored:
            return
        error = redact(error)
        if judged:
            self._state.ledger.fail(rollout_id, error)
        else:
            self._state.ledger.drop(rollout_id, "untrainable")
        self._state.buffer.release(1)
        self._state.room.notify()
        self._discard(rollout_id, group_id, facts, "failed" if judged else "dropped", error)
        group.unfinished.discard(rollout_id)
        group.unscored.discard(rollout_id)
        for given in group.annotations.values():
            given.pop(rollout_id, None)
        self._outcomes.append(False if judged else None)
        self._failures_told += 1
        if self._failures_told <= 5:
            self._state.message(f"rollout {rollout_id} {'failed' if judged else 'is not trained on'}: {error}")
        self._refuse_mass_failure(error)
        self._close_if_done(group)

    def _refuse_mass_failure(self, error: str) -> None:
        failures = self._outcomes.count(False)
        full = len(self._outcomes) == self._outcomes.maxlen
        allowed = self._state.config.max_failure_fraction
        if (full or not allowed) and failures > allowed * len(self._outcomes):
            raise AsyncRLHFError(
                f"{failures} of the last {len(self._outcomes)} rollouts failed "
                f"(max_failure_fraction={allowed:g}); the last cause: {error}"
            )
        if full and None in self._outcomes and True not in self._outcomes:
            raise AsyncRLHFError(
                f"None of the last {len(self._outcomes)} rollouts got a reward; the last cause: {error}"
            )

    def _close_if_done(self, group: GroupInProgress) -> None:
        """When all siblings have ended, put the group into the buffer, unless none of its rollouts can train."""
        if group.unscored:
            return
        del self._state.groups[group.group_id]
        rollouts = tuple(sorted(group.scored, key=lambda info: info.rollout_id))
        self._source.heard(group.prompt, [info.reward for info in rollouts])
        whole = RolloutGroup(group.group_id, rollouts, group.scheduled_step)
        lonely = len(rollouts) == 1 and self._state.config.algorithm.group_relative
        if not rollouts or lonely:
            self._state.buffer.release(len(rollouts))
            self._give_up(whole, "failed", None)
            if group.scheduled_step is not None:
                self._state.buffer.close_group(group.group_id, group.scheduled_step)
        else:
            refused = self._state.buffer.add(whole)
            if refused is not None:
                self._give_up(whole, refused, None)
            elif self._state.config.async_.over_stale == "mask":
                self.evict_stale()  # a straggler without one token inside the bound: maybe no step follows
        self._state.progressed(self._state.batch if self._state.groups else self._state.changed)

    def _give_up(self, group: RolloutGroup, reason: DropReason, uses_left: int | None) -> None:
        """Drop a whole group whose places in the buffer are already free; the gate gets ``uses_left`` places back."""
        self.drop([group], reason)
        self._state.gate.release(uses_left)
        self._state.room.notify()

    def evict_stale(self) -> None:
        """File the groups that the buffer removes because they cannot train at the present version and bound."""
        state = self._state
        state.buffer.set_bound(state.bound)
        self._file(state.buffer.evict_stale(state.version))

    def drop_late(self) -> set[int]:
        """File the groups that could only be consumed over the bound; returns the ids of unfinished rollouts."""
        self.evict_stale()
        state = self._state
        if state.scheduled or state.config.async_.over_stale != "drop":
            return set()
        late = [g.group_id for g in state.groups.values() if state.version - g.version > state.bound]
        return self.cancel(late, "stale")

    def take_up(self) -> None:
        """File the groups of a checkpoint that could only be consumed over this run's bound, which may be smaller than
        the one under which they began; ``over_stale=wait`` would wait for them for ever."""
        state = self._state
        self.drop_late()
        if not state.scheduled and state.config.async_.over_stale == "wait":
            gone = state.buffer.surplus(state.version, {g.group_id: g.version for g in state.groups.values()})
            self._file(state.buffer.discard(gone))
            self.cancel([group_id for group_id in gone if group_id in state.groups], "stale")

    def cancel(self, group_ids: Iterable[int], reason: DropReason) -> set[int]:
        """Drop unfinished groups; returns the ids of their rollouts that are not finished yet."""
        state, gone = self._state, set[int]()
        for group_id in group_ids:
            group = state.groups[group_id]
            scored = {info.rollout_id: info for info in group.scored}
            for rollout_id in sorted(group.unscored | scored.keys()):
                state.ledger.drop(rollout_id, reason)
                self._discard(rollout_id, group_id, scored.get(rollout_id), "dropped", reason)
            gone |= group.unfinished
            state.buffer.release(len(group.unscored) + len(scored))
            state.gate.release()
            del state.groups[group_id]
        for rollout_id in [i for i in state.requeue if i in gone]:
            state.requeue.remove(rollout_id)
        return gone

    def drop_begun_before(self, version: int) -> None:
        """Empty the buffer of groups begun before ``version`` (OAPL, 2602.19362). Rollouts in flight continue as
        ``async.on_weight_update`` says."""
        self._file(self._state.buffer.purge(version))

    def _file(self, gone: list[RolloutGroup]) -> None:
        for group in gone:
            self._give_up(group, "stale", group.uses_left)
        self._state.follow()

    def drop(self, groups: Iterable[RolloutGroup], reason: DropReason) -> None:
        """File the end of whole groups; the caller frees their places in the buffer."""
        for group in groups:
            for info in group.rollouts:
                self._state.ledger.drop(info.rollout_id, reason)
                self._discard(info.rollout_id, group.group_id, info, "dropped", reason)
