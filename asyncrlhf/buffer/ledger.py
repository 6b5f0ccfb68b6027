"""The ledger: the state of every rollout, so that none is lost, invented or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from asyncrlhf.errors import LedgerError
from asyncrlhf.types import DropReason, Prompt

LiveState = Literal["admitted", "generating", "scoring", "buffered"]
LIVE_STATES: tuple[LiveState, ...] = get_args(LiveState)
MAX_FAILURE_REASONS = 20  # distinct sentences kept; a run may see millions of rollouts


@dataclass
class LedgerEntry:
    """A live rollout; only the ledger changes it.

    ``version``: the version that its replica held when it began (None before); ``attempt`` counts reissues.
    """

    rollout_id: int
    group_id: int
    prompt: Prompt
    admitted_at: float
    state: LiveState = "admitted"
    attempt: int = 0
    generator_id: str | None = None
    version: int | None = None
    trained_at: tuple[int, ...] = ()  # versions

    @property
    def uses(self) -> int:
        return len(self.trained_at)


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """A prompt as JSON values. ``metadata`` is copied unchanged: prompt sources keep it JSON-able."""
    return {**vars(prompt), "token_ids": prompt.token_ids.tolist(), "metadata": dict(prompt.metadata)}


def prompt_from_json(value: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**value, "token_ids": np.asarray(value["token_ids"], dtype=np.int64)})


class Ledger:
    """A state machine for each rollout::

        admitted -> generating -> scoring -> buffered -> trained
           ^____________|___________|          (stays buffered while uses are left)
              requeue: the replica died       undo_training: the learner died

    ``drop`` leaves from every live state, ``fail`` from the three before ``buffered``. Ids are issued 0, 1, 2, ...: an
    id below ``next_id`` that is not live has ended, so ended rollouts need no memory and late arrivals are still
    recognised. Every step that is not in the drawing raises :class:`LedgerError`.
    """

    def __init__(self) -> None:
        self.note: Callable[..., None] = lambda event, **facts: None  # called with every step, as journal events
        self._live: dict[int, LedgerEntry] = {}
        self._in_state: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._failure_reasons: Counter[str] = Counter()
        self._failed = 0
        self._trained = 0
        self._uses = 0
        self._next_id = 0
        self._uses_at: Counter[int] = Counter()  # by version, of this process
        self._ended_at: Counter[int] = Counter()  # rollouts that ended as trained, by the version of their first use

    def get(self, rollout_id: int) -> LedgerEntry | None:
        """The live entry, or None if the rollout has ended; raises LedgerError for an id that was never admitted."""
        if not 0 <= rollout_id < self._next_id:
            raise LedgerError(f"rollout {rollout_id} was never admitted; ids below {self._next_id} were.")
        return self._live.get(rollout_id)

    def live_ids(self, state: LiveState | None = None) -> list[int]:
        """Ids in ``state``, or in every live state, oldest first."""
        return sorted(i for i, entry in self._live.items() if state is None or entry.state == state)

    def admit(self, rollout_id: int, group_id: int, prompt: Prompt, now: float) -> None:
        if rollout_id != self._next_id:
            raise LedgerError(f"rollout {rollout_id} cannot be admitted; the next id is {self._next_id}.")
        self._next_id += 1
        self._live[rollout_id] = LedgerEntry(rollout_id, group_id, prompt, now)
        self._in_state["admitted"] += 1
        self.note("admitted", ids=(rollout_id,), group=group_id, prompt=prompt.prompt_id)

    def start(self, rollout_id: int, generator_id: str, version: int) -> None:
        """A replica that holds ``version`` begins to sample the rollout."""
        entry = self._expect(rollout_id, "start", "admitted")
        self._move(entry, "generating")
        entry.generator_id, entry.version = generator_id, version
        self.note("started", ids=(rollout_id,), replica=generator_id, version=version)

    def finish_generation(self, rollout_id: int) -> None:
        self._move(self._expect(rollout_id, "finish_generation", "generating"), "scoring")
        self.note("finished", ids=(rollout_id,))

    def buffer(self, rollout_id: int) -> None:
        self._move(self._expect(rollout_id, "buffer", "scoring"), "buffered")
        self.note("buffered", ids=(rollout_id,))

    def train(self, rollout_id: int, version: int, last_use: bool) -> None:
        """Count one use in the step at ``version``; ``last_use`` ends the rollout. One use a step at most."""
        entry = self._expect(rollout_id, "train", "buffered")
        if entry.uses and version <= entry.trained_at[-1]:
            raise LedgerError(
                f"rollout {rollout_id} was to be trained at version {version}, "
                f"but was trained at version {entry.trained_at[-1]} already."
            )
        self.note("trained", ids=(rollout_id,), version=version, last=last_use)
        self._uses += 1
        self._uses_at[version] += 1
        entry.trained_at = (*entry.trained_at, version)
        if last_use:
            self._end_trained(entry)

    def undo_training(self, version: int, returned: Iterable[LedgerEntry] = ()) -> None:
        """Undo the trainings at ``version`` or later, because the learner went back to ``version``. Rollouts that such
        a training ended are dropped as ``rolled_back`` unless an earlier training counts or they are in ``returned``,
        which are back in the buffer; live rollouts get these uses back."""
        for entry in returned:
            self._live[entry.rollout_id] = entry
            self._in_state[entry.state] += 1
            self._trained -= 1
            self._ended_at[entry.trained_at[0]] -= 1
        undone = {at for at in self._uses_at if at >= version}
        self._uses -= sum(self._uses_at.pop(at) for at in undone)
        lost = sum(self._ended_at.pop(at, 0) for at in undone)
        self._trained -= lost
        self._dropped["rolled_back"] += lost
        for entry in self._live.values():
            entry.trained_at = tuple(at for at in entry.trained_at if at < version)

    def drop(self, rollout_id: int, reason: DropReason) -> None:
        """End a live rollout. A rollout that was trained before, and has uses left, ends as trained."""
        entry = self._expect(rollout_id, f"drop({reason})", *LIVE_STATES)
        if reason not in get_args(DropReason):
            raise LedgerError(
                f"rollout {rollout_id}: drop reason {reason!r} is unknown; allowed: {get_args(DropReason)}."
            )
        self.note("retired" if entry.uses else "dropped", ids=(rollout_id,), reason=reason)
        if entry.uses:
            self._end_trained(entry)
        else:
            self._dropped[reason] += 1
            self._end(entry)

    def fail(self, rollout_id: int, reason: str) -> None:
        """End a rollout that could not be generated or scored; ``reason`` is one sentence for the summary."""
        entry = self._expect(rollout_id, "fail", "admitted", "generating", "scoring")
        self.note("failed", ids=(rollout_id,), reason=reason)
        self._failed += 1
        known = reason in self._failure_reasons or len(self._failure_reasons) < MAX_FAILURE_REASONS
        self._failure_reasons[reason if known else "other"] += 1
        self._end(entry)

    def requeue(self, rollout_id: int) -> None:
        """The rollout's replica died: it waits to be issued again with the same prompt."""
        entry = self._expect(rollout_id, "requeue", "generating", "scoring")
        self._move(entry, "admitted")
        self.note("requeued", ids=(rollout_id,))
        entry.attempt, entry.generator_id, entry.version = entry.attempt + 1, None, None

    def counts(self) -> dict[str, Any]:
        """Rollouts by state. ``admitted``: rollouts that wait now; ``admitted_total``: all rollouts ever admitted.

        ``admitted_total = admitted + generating + scoring + buffered + trained + dropped + failed`` at every moment.
        ``uses`` counts each training of a rollout, so it exceeds ``trained`` with ``buffer.max_reuse > 1``.
        """
        return {
            "admitted_total": self._next_id,
            **{state: self._in_state[state] for state in LIVE_STATES},
            "trained": self._trained,
            "uses": self._uses,
            "dropped": self._dropped.total(),
            "dropped_by_reason": {reason: self._dropped[reason] for reason in get_args(DropReason)},
            "failed": self._failed,
            "failed_by_reason": dict(self._failure_reasons),
        }

    def check(self) -> None:
        """Raise LedgerError unless every admitted rollout is in exactly one state."""
        scanned = Counter(entry.state for entry in self._live.values())
        if any(scanned[state] != self._in_state[state] for state in LIVE_STATES):
            raise LedgerError(f"the live rollouts are {dict(scanned)}, but {dict(self._in_state)} were counted.")
        total = len(self._live) + self._trained + self._dropped.total() + self._failed
        if total != self._next_id:
            raise LedgerError(
                f"{self._next_id} rollouts were admitted, but {total} are accounted for: {self.counts()}."
            )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; a group's prompt is written once."""
        entries = [self._live[i] for i in sorted(self._live)]
        return {
            "next_id": self._next_id,
            "trained": self._trained,
            "uses": self._uses,
            "failed": self._failed,
            "dropped": dict(self._dropped),
            "failure_reasons": dict(self._failure_reasons),
            "prompts": {str(entry.group_id): prompt_to_json(entry.prompt) for entry in entries},
            "live": [{k: v for k, v in vars(entry).items() if k != "prompt"} for entry in entries],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore. Rollouts in flight keep their state: the caller requeues them."""
        prompts = {int(group): prompt_from_json(value) for group, value in state["prompts"].items()}
        self._live = {row["rollout_id"]: LedgerEntry(prompt=prompts[row["group_id"]], **row) for row in state["live"]}
        for entry in self._live.values():
            entry.trained_at = tuple(entry.trained_at)  # a list in JSON
        self._in_state = Counter(entry.state for entry in self._live.values())
        self._dropped = Counter(state["dropped"])
        self._failure_reasons = Counter(state["failure_reasons"])
        self._next_id, self._trained = state["next_id"], state["trained"]
        self._uses, self._failed = state["uses"], state["failed"]
        self._uses_at.clear()
        self._ended_at.clear()
        self.check()

    def _expect(self, rollout_id: int, asked: str, *allowed: LiveState) -> LedgerEntry:
        entry = self.get(rollout_id)
        if entry is None or entry.state not in allowed:
            state = "ended" if entry is None else entry.state
            raise LedgerError(f"rollout {rollout_id} is {state}; {asked} needs one of: {', '.join(allowed)}.")
        return entry

    def _move(self, entry: LedgerEntry, state: LiveState) -> None:
        self._in_state[entry.state] -= 1
        self._in_state[state] += 1
        entry.state = state

    def _end_trained(self, entry: LedgerEntry) -> None:
        self._trained += 1
        self._ended_at[entry.trained_at[0]] += 1
        self._end(entry)

    def _end(self, entry: LedgerEntry) -> None:
        self._in_state[entry.state] -= 1
        del self._live[entry.rollout_id]
