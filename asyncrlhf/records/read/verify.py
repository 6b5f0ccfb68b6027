"""``asyncrlhf verify``: recomputes a run's guarantees from its raw records and reports those that do not hold.

No derived value is trusted: the journal's events are replayed, staleness is computed from the tokens' versions, and the
values of metrics.jsonl and summary.json are compared with their sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.records.read.recorded import Recorded, read_rollouts
from asyncrlhf.records.read.replay import LIVE, STATES, TRAINED, Findings, History, Replay, Step, read_journal
from asyncrlhf.records.show.summary import mean, reward_ends, timing_means, values
from asyncrlhf.records.write.checkpoint import STATE_FILE, list_checkpoints
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.record_marker import RecordMarker, changed, check_lines
from asyncrlhf.records.write.recorder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, plain, read_metrics
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.records.write.spans import SPANS_FOLDER

SLACK = 1.0  # seconds by which a span may end after the journal's last line


@dataclass
class Verdict:
    """``broken``: one sentence per broken guarantee; ``notes``: what is in flight or could not be checked; ``checked``:
    the number of checked items by kind."""

    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        return ", ".join(f"{n:,} {what if n != 1 else what.removesuffix('s')}" for what, n in self.checked.items())


def verify(run_dir: Path) -> list[str]:
    """One sentence per broken guarantee; empty if all hold. Raises ConfigError if it is not a run of ``train``."""
    return examine(run_dir).broken


def examine(run_dir: Path) -> Verdict:
    """As :func:`verify`, with the number of checked items."""
    return _Examination(Path(run_dir)).verdict()


def _yaml(text: str) -> Any:
    """By libyaml if PyYAML has it, which takes a tenth of the time."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class _Examination:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.found = Findings()
        self.notes: list[str] = []
        if not run_dir.is_dir():
            raise ConfigError(
                f"{run_dir} is not a folder; give the directory of a run, such as runs/arithmetic/<time>."
            )
        if not (run_dir / JOURNAL_FILE).is_file():
            raise ConfigError(f"{run_dir} holds no {JOURNAL_FILE}, so it is not a run of asyncrlhf train.")
        self.summary: dict[str, Any] | None = self._document(SUMMARY_FILE, json.loads)
        self.config = self._document(CONFIG_FILE, _yaml) or {}
        if "stage" in (self.summary or {}) or "async" not in self.config:
            raise ConfigError(f"{run_dir} is not a run of asyncrlhf train; there is nothing else to verify.")
        self.metrics = self._metrics()
        self.rows = read_rollouts(run_dir, self.found)
        self.marker = RecordMarker()  # of the newest checkpoint
        self.history = self._history()

    def _document(self, name: str, parse: Any) -> dict[str, Any] | None:
        path = self.run_dir / name
        if not path.is_file():
            return None
        try:
            value = parse(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError, OSError):
            value = None
        if not isinstance(value, dict):
            self.found.add(f"{name} cannot be read.")
            return None
        return value

    def _metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / METRICS_FILE
        try:
            return read_metrics(path) if path.is_file() else []
        except (ConfigError, UnicodeDecodeError) as error:
            self.found.add(str(error).replace(str(path), METRICS_FILE))
            return []

    def _history(self) -> History:
        documents: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        for folder in list_checkpoints(self.run_dir):
            name = f"checkpoints/{folder.name}/{STATE_FILE}"
            document = self._document(name, json.loads)
            if document is not None and (line := document.get("marker", {}).get("journal", 0)):
                documents.setdefault(line, []).append((name, document))
        replay = Replay(self.found, documents)
        history = replay.of(read_journal(self.run_dir / JOURNAL_FILE, self.found))
        history.totals_at.setdefault(history.last_line + 1, history.totals())
        for line, held in documents.items():
            for name, document in held:
                # Of lines that are undone: a resume passed this checkpoint over, and it is no part of the history.
                if line in history.totals_at or line > history.last_line:
                    self._check_checkpoint(name, document, history.totals_at.get(line))
                    self._mark(name, document["marker"])
        return history

    def _mark(self, name: str, counts: Any) -> None:
        try:
            marker = RecordMarker.of(counts, self.run_dir / name)
        except CheckpointError as error:
            self.found.add(str(error).replace(str(self.run_dir / name), name))
            return
        if marker.metrics_lines <= len(self.metrics):
            self.marker = marker

    def _check_checkpoint(self, name: str, document: dict[str, Any], totals: dict[str, Any] | None) -> None:
        ledger = document["ledger"]
        said = {
            "admitted": ledger["next_id"],
            "trained": ledger["trained"],
            "uses": ledger["uses"],
            "dropped": {reason: count for reason, count in ledger["dropped"].items() if count},
            "failed": ledger["failed"],
            "left": len(ledger["live"]),
        }
        if totals is None:
            self.found.add(
                f"{name} was made after line {document['marker']['journal']} of the journal, which lacks it."
            )
        elif said != totals:
            self.found.add(f"{name} counts {said}, where the journal has {totals}.")

    # --- the checks

    def verdict(self) -> Verdict:
        self._check_metrics()
        recorded = self.config.get("logging", {}).get("rollouts", True)
        if recorded:
            checks = _RolloutChecks(self.rows, self.history, self.metrics, self.whole)
            checks.run()
            self.notes += checks.notes
        else:
            self.notes.append("logging.rollouts was off: staleness and versions of the tokens are unknown.")
        if self.summary is not None:
            self._check_summary(self.summary)
        self._check_sealed_lines()
        self._check_tokens()
        spans = self._check_spans()
        checked = {"rollouts": len(self.rows.ids), "tokens": int(self.rows.lengths.sum())}
        checked |= {"uses": len(self.rows.used_at), "steps": len(self.history.steps)}
        checked |= {"publishes": self.history.publishes, "events": self.history.lines}
        checked |= {"attempts": self.history.attempts}
        self._tell_what_is_open(self.history)
        checked |= {"spans": spans} if spans else {}
        return Verdict(self.found.sentences(), self.notes, checked)

    @property
    def whole(self) -> bool:
        """Whether the run recorded its end: no further records will come, and it could write all that it had."""
        return self.summary is not None and bool(self.summary.get("records_whole", True))

    def _tell_what_is_open(self, history: History) -> None:
        open_states = {STATES[state]: history.state.count(state) for state in LIVE if history.state.count(state)}
        if open_states:
            said = ", ".join(f"{count:,} {state}" for state, count in open_states.items())
            how = "when it ended" if self.whole else "when its records end (it was killed, or still runs)"
            self.notes.append(f"In flight {how}: {said}.")
        if history.open_publish is not None and not self.whole:
            self.notes.append(f"Version {history.open_publish} was on its way to the replicas.")
        if undone := history.last_line + 1 - history.lines:
            self.notes.append(f"{undone:,} lines of the journal are undone by a resume.")

    def _check_metrics(self) -> None:
        numbers = [row.get("step") for row in self.metrics]
        wrong = [number for i, number in enumerate(numbers, 1) if number != i]
        if wrong:
            self.found.add(f"{METRICS_FILE}: the steps are not 1 to {len(numbers)}; out of place: {{ids}}.", *wrong)
        times = values(self.metrics, "wall_time")
        for i in np.flatnonzero(np.diff(times) < 0):
            self.found.add(f"{METRICS_FILE}: wall_time falls after the lines of steps {{ids}}.", int(i) + 1)
        for row in self.metrics:
            if row.get("policy_version", row.get("step")) != row.get("step"):
                self.found.add(
                    f"{METRICS_FILE}: policy_version is not the step in the lines of steps {{ids}}.", row["step"]
                )
        made, logged = len(self.history.steps), len(self.metrics)
        # A step's line follows the journal's by a step at most; a run that broke off may lack it.
        late = 0 if self.history.ended in ("done", "interrupted") else 2
        if not made - late <= logged <= made:
            self.found.add(f"{METRICS_FILE} has {logged} steps, {JOURNAL_FILE} {made}.")
        for step, row in zip(self.history.steps, self.metrics, strict=False):
            if row.get("staleness_bound") != step.bound:
                said = f"{METRICS_FILE}: staleness_bound is not the one in force ({JOURNAL_FILE}) at steps {{ids}}."
                self.found.add(said, step.number)

    def _check_summary(self, summary: dict[str, Any]) -> None:
        if not self.whole:
            self.notes.append(f"The run could not write all of its records ({summary.get('exit_reason')}).")
            return
        said = summary.get("ledger") or {}
        totals = self.history.totals()
        found = {**{k: said.get(k) for k in totals}, "failed": sum((said.get("failed") or {}).values())}
        for key, value in totals.items():
            if found[key] != value:
                self.found.add(f"{SUMMARY_FILE}: ledger.{key} is {found[key]}, the records have {value}.")
        if self.history.ended != summary.get("exit_reason"):
            self.found.add(f"{SUMMARY_FILE}: exit_reason is not the reason of the end in {JOURNAL_FILE}.")
        if self.history.ended == "done":
            self._check_done(self.history)
        rows = self.metrics
        derived = {
            "steps": int(rows[-1].get("step", 0)) if rows else 0,
            "policy_version": rows[-1].get("policy_version") if rows else 0,
            "wall_seconds": rows[-1].get("wall_time") if rows else None,
            "reward": reward_ends(rows),
            "staleness.mean": mean(values(rows, "staleness_mean")),
            "staleness.max": max(values(rows, "staleness_max"), default=None),
            "timings": timing_means(rows),
        }
        for key, value in derived.items():
            at: Any = summary
            for part in key.split("."):
                at = at.get(part) if isinstance(at, dict) else None
            if at != plain(value):
                self.found.add(f"{SUMMARY_FILE}: {key} is not what {METRICS_FILE} gives.")

    def _check_done(self, history: History) -> None:
        if left := history.totals()["left"]:
            self.found.add(f"{JOURNAL_FILE}: the run was done, and {left} rollouts are in no end.")
        if history.steps and (history.open_publish is not None or history.last_published != history.steps[-1].number):
            last = history.last_published
            self.found.add(f"{JOURNAL_FILE}: the run was done, and the replicas hold version {last} of its weights.")

    def _check_sealed_lines(self) -> None:
        """Check that the lines after which the newest checkpoint was made are unchanged."""
        for name, lines in self.marker.lines.items():
            try:
                check_lines(self.run_dir / name, lines, self.marker.seals.get(name, {}))
            except CheckpointError as error:
                self.found.add(str(error).replace(str(self.run_dir / name), name))

    def _check_tokens(self) -> None:
        """Check that the parts of ``rollout_tokens/`` can be read, and that those of the newest checkpoint are there,
        unchanged."""
        sealed = {name: facts for name, facts in self.marker.seals.items() if name.startswith(f"{TOKENS_FOLDER}/")}
        found = dict(changed(self.run_dir, sealed))
        for path in (self.run_dir / TOKENS_FOLDER).glob("steps-*.parquet"):
            try:
                pq.read_metadata(path)
            except (OSError, pa.ArrowException, ValueError) as error:
                found[f"{TOKENS_FOLDER}/{path.name}"] = f"cannot be read: {' '.join(str(error).split())[:200]}"
        for name, said in sorted(found.items()):
            self.found.add(f"{name} {said}.")

    def _check_spans(self) -> int:
        """Check that all spans lie within the run; returns their number."""
        number, seconds = 0, values(self.metrics, "wall_time")
        resumed = self.history.resumed_at
        before = seconds[resumed - 1] if 0 < resumed <= len(seconds) else 0.0
        limit = before + self.history.wall + SLACK if self.whole else np.inf
        for path in sorted((self.run_dir / SPANS_FOLDER).glob("part-*.parquet")):
            name = f"{SPANS_FOLDER}/{path.name}"
            try:
                table = pq.read_table(path, columns=["part", "start", "end", "clock_error"])
            except (OSError, pa.ArrowException, ValueError) as error:
                self.found.add(f"{name} cannot be read: {' '.join(str(error).split())[:200]}")
                continue
            start, end, off = (table[key].to_numpy() for key in ("start", "end", "clock_error"))
            outside = (start < -off) | (end < start) | (end > limit + off)
            if outside.any():
                parts = sorted(set(np.array(table["part"].to_pylist())[outside]))
                self.found.add(f"{name}: spans of {{ids}} lie outside of the run.", *parts)
            number += table.num_rows
        return number


class _RolloutChecks:
    """Checks of the recorded rollouts: against each other, the journal, the bounds in force and the metrics. ``whole``:
    the run recorded its end, so that no further records will come."""

    def __init__(self, rows: Recorded, history: History, metrics: Sequence[Mapping[str, Any]], whole: bool) -> None:
        self.found, self.rows, self.metrics, self.whole = history.found, rows, metrics, whole
        self.history, self.steps = history, history.steps
        self.notes: list[str] = []  # what could not be checked

    def run(self) -> None:
        self._rows()
        self._against_journal()
        self._versions()
        self._uses()

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
        for said, wrong in rows.turns.faults.items():
            self._name(said, wrong)

    def _against_journal(self) -> None:
        rows, state = self.rows, np.frombuffer(bytes(self.history.state), dtype=np.uint8)
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
        self._origins(at)
        self._compare_uses(at)

    def _origins(self, at: np.ndarray) -> None:
        """Check the replica that sampled each rollout, and the range of versions that it can have used."""
        rows, history = self.rows, self.history
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
        rows.turns.check_weights(rows.ids, history.episodes, self._name)

    def _compare_uses(self, at: np.ndarray) -> None:
        """Check that the journal and the rows of ended rollouts contain the same trainings."""
        rows = self.rows
        journal = np.array(self.history.uses, dtype=np.int64).reshape(-1, 2)
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
        if self.whole:
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
        over = np.flatnonzero(count > expected)
        self._step_finding("rollouts/: steps {ids} trained more rollouts than their batch has.", over)
        whole = count == expected
        if self.whole and not self.history.totals()["left"]:
            fewer = np.flatnonzero(~whole)
            self._step_finding("rollouts/: steps {ids} trained fewer rollouts than their batch has.", fewer)
        largest = np.full(total, -1)
        np.maximum.at(largest, at, stale)
        figures = {
            "staleness_mean": np.bincount(at, stale, total) / np.maximum(count, 1),
            "staleness_max": largest,
            "reward_mean": np.bincount(at, rows.rewards[row], total) / np.maximum(count, 1),
            "response_length_mean": np.bincount(at, rows.lengths[row], total) / np.maximum(count, 1),
            **rows.turns.figures(row, at, rows.lengths, total),
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
