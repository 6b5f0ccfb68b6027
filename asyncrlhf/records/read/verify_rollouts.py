"""Checks of a run's recorded rollouts: against each other, the journal, the bounds in force and the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrlhf.records.read.history import LIVE, TRAINED, Findings, History, Step
from asyncrlhf.records.read.recorded import Recorded
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.recorder import METRICS_FILE


class RolloutChecks:
    """``whole``: the run recorded its end, so that no further records will come."""

    def __init__(
        self,
        found: Findings,
        rows: Recorded,
        steps: Sequence[Step],
        metrics: Sequence[Mapping[str, Any]],
        history: History | None,
        whole: bool,
    ) -> None:
        self.found = found
        self.rows = rows
        self.steps = steps
        self.metrics = metrics
        self.history = history
        self.whole = whole
        self.notes: list[str] = []

    def all(self) -> list[str]:
        """Run every check; returns one sentence for each that was not possible."""
        self._rows()
        if self.history is not None:
            self._against_journal(self.history)
        self._versions()
        self._uses()
        return self.notes

    def _name(self, said: str, rows: np.ndarray) -> None:
        """Add a finding about these rows, with the first row's file and the rollouts' ids."""
        if len(rows):
            self.found.add(f"{self.rows.file(int(rows[0]))}: {said}", *(int(i) for i in self.rows.ids[rows]))

    def _rows(self) -> None:
        rows = self.rows
        order = np.argsort(rows.ids, kind="stable")
        self._name("rollouts {ids} have more than one row.", order[1:][np.diff(rows.ids[order]) == 0])
        self._name("rollouts {ids} ended in an unknown state.", np.flatnonzero(rows.ends < 0))
        used = np.zeros(len(rows.ids), dtype=bool)
        used[rows.used_row] = True
        self._name("rollouts {ids} count as trained without a use.", np.flatnonzero((rows.ends == TRAINED) & ~used))
        self._name(
            "rollouts {ids} were used and do not count as trained.", np.flatnonzero((rows.ends != TRAINED) & used)
        )
        self._name("rollouts {ids} have a token older than the one before it.", np.flatnonzero(rows.falls))

    def _against_journal(self, history: History) -> None:
        rows, state = self.rows, np.frombuffer(bytes(history.state), dtype=np.uint8)
        known = rows.ids < len(state)
        self._name("rollouts {ids} were never admitted.", np.flatnonzero(~known))
        at = np.flatnonzero(known)
        ended, recorded = state[rows.ids[at]], rows.ends[at]
        # Of a killed run, rows may be on disk whose journal lines are not.
        wrong = (ended != recorded) & (self.whole | ~np.isin(ended, LIVE))
        self._name(f"rollouts {{ids}} ended otherwise in {JOURNAL_FILE}.", at[wrong])
        missing = np.setdiff1d(np.flatnonzero(~np.isin(state, LIVE)), rows.ids)
        if len(missing) and self.whole:
            self.found.add(f"rollouts/: rollouts {{ids}} ended ({JOURNAL_FILE}) and have no row.", *map(int, missing))
        elif len(missing):
            self.notes.append(f"{len(missing):,} rollouts ended whose rows were not written yet.")
        self._origins(history, at)
        self._compare_uses(history, at)

    def _origins(self, history: History, at: np.ndarray) -> None:
        """Check the replica that sampled each rollout, and the range of versions that it can have used."""
        rows = self.rows
        at = at[rows.lengths[at] > 0]
        ids = rows.ids[at]
        begun = np.array([version for _, version in history.started] or [0])[ids]
        asked = np.array(history.newest or [0])[ids]
        names = {name: number for number, name in enumerate(rows.generators)}
        replica = np.array([names.get(name, -2) for name, _ in history.started] or [0])[ids]
        done = asked >= 0  # others did not finish, by the journal
        self._name(
            "rollouts {ids} have a token older than their replica's weights.", at[done & (rows.oldest[at] < begun)]
        )
        late = at[done & (rows.newest[at] > asked)]
        self._name("rollouts {ids} have a token of a version that their replica was not given.", late)
        named = rows.generator[at]
        self._name("rollouts {ids} name another replica than the one that got them.", at[done & (named != replica)])

    def _compare_uses(self, history: History, at: np.ndarray) -> None:
        """Check that the journal and the rows of ended rollouts contain the same trainings."""
        rows = self.rows
        journal = np.array(history.uses, dtype=np.int64).reshape(-1, 2)
        journal = journal[np.isin(journal[:, 0], rows.ids[at])]
        width = 1 + max(journal[:, 1].max(initial=0), rows.used_at.max(initial=0))
        recorded = rows.ids[rows.used_row] * width + rows.used_at
        for said, here, there in (
            (f"rollouts {{ids}} were trained at versions that {JOURNAL_FILE} lacks.", recorded, journal @ [width, 1]),
            ("rollouts {ids} lack a training that " + JOURNAL_FILE + " has.", journal @ [width, 1], recorded),
        ):
            ids = np.setdiff1d(here, there) // width
            if self.whole or said.startswith("rollouts {ids} lack"):
                self._name(said, np.flatnonzero(np.isin(rows.ids, ids)))

    def _versions(self) -> None:
        """Check the tokens' versions against the versions at which they were trained."""
        rows = self.rows
        later = rows.newest[rows.used_row] > rows.used_at
        self._name("rollouts {ids} have a token newer than the policy that trained them.", rows.used_row[later])
        twice = (np.diff(rows.used_row) == 0) & (np.diff(rows.used_at) <= 0)
        self._name("rollouts {ids} were trained twice at one version.", rows.used_row[1:][twice])
        last = np.full(len(rows.ids), -1)
        last[rows.used_row] = rows.used_at  # the last of each row stays
        expected = np.where((last >= 0) & (rows.lengths > 0), last - rows.oldest, rows.staleness)
        self._name(
            "rollouts {ids} have another staleness than their tokens.", np.flatnonzero(expected != rows.staleness)
        )

    def _uses(self) -> None:
        """Check batches, reuse, the bound in force, and the metrics of each step, over the uses of all rows."""
        rows, steps = self.rows, self.steps
        if not steps or not len(rows.used_at):
            return
        strange = rows.used_at >= len(steps)
        if self.whole or self.history is None:
            self._name("rollouts {ids} were trained after the last step.", rows.used_row[strange])
        row, at = rows.used_row[~strange], rows.used_at[~strange]
        first = np.concatenate([[True], np.diff(row) != 0]) if len(row) else np.array([], dtype=bool)
        counts = np.bincount(rows.used_row, minlength=len(rows.ids))
        most = max(step.rules.buffer.max_reuse for step in steps)
        self._name(f"rollouts {{ids}} were trained over buffer.max_reuse={most}.", np.flatnonzero(counts > most))
        stale = at - rows.oldest[row]
        low, high = _allowed(steps, at, first)
        age = stale <= at - low
        masks = [(s.rules.asynchrony.over_stale == "mask", not s.rules.buffer.replays) for s in steps]
        masked = np.array([masked for masked, _ in masks])[at] & (first | np.array([all_ for _, all_ in masks])[at])
        held = np.where(masked, self._group_is_inside(row, at, low), age)
        self._name(
            "rollouts {ids} were trained over the staleness bound in force.", row[(rows.lengths[row] > 0) & ~held]
        )
        self._name("rollouts {ids} have a token newer than their step's schedule.", row[rows.newest[row] > high])
        self._step_figures(row, at, stale)

    def _group_is_inside(self, row: np.ndarray, at: np.ndarray, low: np.ndarray) -> np.ndarray:
        """For over_stale=mask, which trains a group as long as one of its tokens is inside the bound."""
        key = self.rows.groups[row] * (len(self.steps) + 1) + at
        _, group = np.unique(key, return_inverse=True)
        inside = np.zeros(group.max(initial=-1) + 1, dtype=bool)
        np.logical_or.at(inside, group, self.rows.newest[row] >= low)
        return inside[group]

    def _step_figures(self, row: np.ndarray, at: np.ndarray, stale: np.ndarray) -> None:
        """Check the batch of each step and its line in the metrics. Steps that trained rollouts still held are skipped:
        the rows of those are not written yet."""
        rows, steps, total = self.rows, self.steps, len(self.steps)
        count = np.bincount(at, minlength=total)
        expected = np.array([step.rollouts for step in steps])
        full = np.array([step.rules.batch_size for step in steps])
        over = np.flatnonzero(count > np.where(expected >= 0, expected, full))
        self._step_finding("rollouts/: steps {ids} trained more rollouts than their batch has.", over)
        whole = count == expected if self.history is not None else count == full
        if self.whole and self.history is not None and not self.history.totals()["left"]:
            fewer = np.flatnonzero(~whole)
            self._step_finding("rollouts/: steps {ids} trained fewer rollouts than their batch has.", fewer)
        largest = np.full(total, -1)
        np.maximum.at(largest, at, stale)
        figures = {
            "staleness_mean": np.bincount(at, stale, total) / np.maximum(count, 1),
            "staleness_max": largest,
            "reward_mean": np.bincount(at, rows.rewards[row], total) / np.maximum(count, 1),
            "response_length_mean": np.bincount(at, rows.lengths[row], total) / np.maximum(count, 1),
        }
        for name, recomputed in figures.items():
            said = np.array([np.nan if (v := m.get(name)) is None else v for m in self.metrics[:total]], dtype=float)
            off = ~np.isclose(said, recomputed[: len(said)], rtol=1e-6, atol=1e-9, equal_nan=True)
            wrong = np.flatnonzero(off & whole[: len(said)])
            self._step_finding(
                f"{METRICS_FILE}: {name} is not what the rollouts of the step give, in steps {{ids}}.", wrong
            )

    def _step_finding(self, said: str, versions: np.ndarray) -> None:
        if len(versions):
            self.found.add(said, *(int(version) + 1 for version in versions))


def _allowed(steps: Sequence[Step], at: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The oldest and the newest version [U] that each use may have; ``first``: whether it is the rollout's first."""
    fresh, again, newest = (np.zeros(len(steps), dtype=np.int64) for _ in range(3))
    for i, step in enumerate(steps):
        rules, version = step.rules, step.number - 1
        newest[i] = version
        lag, over = rules.asynchrony.fixed_lag, rules.asynchrony.over_stale
        if lag is not None:
            fresh[i] = again[i] = max(0, version - lag)
            newest[i] = max(fresh[i], step.resumed_at)
            continue
        fresh[i] = {"wait": version - rules.asynchrony.bound, "downweight": 0}.get(over, version - step.bound)
        again[i] = 0 if over == "downweight" else version - step.bound
        if rules.buffer.replays:
            again[i] = version - min(rules.buffer.max_age or step.bound, step.bound)
    return np.where(first, fresh[at], again[at]), newest[at]
