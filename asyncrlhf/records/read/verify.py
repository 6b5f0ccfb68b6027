"""``asyncrlhf verify``: recomputes a run's guarantees from its raw records and reports those that do not hold.

No derived value is trusted: the journal's events are replayed, staleness is computed from the tokens' versions, and the
values of metrics.jsonl and summary.json are compared with their sources.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from asyncrlhf.data.checkpoint_manifest import damages
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.records.read.history import LIVE, STATES, TRAINED, Findings, History, Rules, Step, read_journal
from asyncrlhf.records.read.recorded import read_rollouts
from asyncrlhf.records.read.replay import Replay
from asyncrlhf.records.read.verify_rollouts import RolloutChecks
from asyncrlhf.records.show.summary import mean, reward_ends, timing_means, values
from asyncrlhf.records.write.checkpoint import STATE_FILE, list_checkpoints
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.record_marker import RecordMarker, check_lines
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
        has_journal = (run_dir / JOURNAL_FILE).is_file()
        if not has_journal and not (run_dir / METRICS_FILE).is_file():
            raise ConfigError(f"{run_dir} holds no {JOURNAL_FILE} and no {METRICS_FILE}, so it is not a run directory.")
        self.summary: dict[str, Any] | None = self._document(SUMMARY_FILE, json.loads)
        self.config = self._document(CONFIG_FILE, _yaml) or {}
        if "stage" in (self.summary or {}) or "async" not in self.config:
            raise ConfigError(f"{run_dir} is not a run of asyncrlhf train; there is nothing else to verify.")
        self.metrics = self._metrics()
        self.rows = read_rollouts(run_dir, self.found)
        self.marker = RecordMarker()  # of the newest checkpoint
        self.history = self._history() if has_journal else None
        self.steps = self.history.steps if self.history is not None else self._steps_of_metrics()

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

    def _steps_of_metrics(self) -> list[Step]:
        """For a run without a journal: its steps from metrics.jsonl, and its rules from its config."""
        self.notes.append(
            f"There is no {JOURNAL_FILE} (an older version made the run): order and publishes are unknown."
        )
        every = self.config.get("weights", {}).get("publish_every", 1)
        try:
            rules = Rules.of({**self.config, "publish_every": every})
        except (KeyError, TypeError, ConfigError):
            self.notes.append(f"{CONFIG_FILE} is of another version: batches and bounds are unknown.")
            return []
        bounds = [row.get("staleness_bound", rules.asynchrony.bound) for row in self.metrics]
        return [Step(i + 1, -1, rules, int(bound), i) for i, bound in enumerate(bounds)]

    # --- the checks

    def verdict(self) -> Verdict:
        self._check_metrics()
        recorded = self.config.get("logging", {}).get("rollouts", True)
        if recorded:
            checks = RolloutChecks(self.found, self.rows, self.steps, self.metrics, self.history, self.whole)
            self.notes += checks.all()
        else:
            self.notes.append("logging.rollouts was off: staleness and versions of the tokens are unknown.")
        if self.summary is not None:
            self._check_summary(self.summary)
        self._check_sealed_lines()
        self._check_tokens()
        spans = self._check_spans()
        checked = {"rollouts": len(self.rows.ids), "tokens": int(self.rows.lengths.sum())}
        checked |= {"uses": len(self.rows.used_at), "steps": len(self.steps)}
        if (history := self.history) is not None:
            checked |= {"publishes": history.publishes, "events": history.lines, "attempts": history.attempts}
            self._tell_what_is_open(history)
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
        if self.history is None:
            return
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
        totals = self.history.totals() if self.history is not None else self._totals_of_rows(said)
        found = {**{k: said.get(k) for k in totals}, "failed": sum((said.get("failed") or {}).values())}
        for key, value in totals.items():
            if found[key] != value:
                self.found.add(f"{SUMMARY_FILE}: ledger.{key} is {found[key]}, the records have {value}.")
        if self.history is not None:
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

    def _totals_of_rows(self, said: dict[str, Any]) -> dict[str, Any]:
        """Without a journal, take the ended rollouts from the rows and the unfinished ones from the summary."""
        ends = np.bincount(self.rows.ends[self.rows.ends >= 0], minlength=len(STATES))
        dropped = sum((said.get("dropped") or {}).values())
        admitted = int(ends.sum()) + int(said.get("left") or 0)
        if int(ends[STATES.index("dropped")]) != dropped:
            self.found.add(f"{SUMMARY_FILE}: ledger.dropped adds up to {dropped}, the rows to {ends[5]}.")
        return {"admitted": admitted, "trained": int(ends[TRAINED]), "failed": int(ends[STATES.index("failed")])}

    def _check_sealed_lines(self) -> None:
        """Check that the lines after which the newest checkpoint was made are unchanged."""
        for name, lines in self.marker.lines.items():
            try:
                check_lines(self.run_dir / name, lines, self.marker.seals.get(name))
            except CheckpointError as error:
                self.found.add(str(error).replace(str(self.run_dir / name), name))

    def _check_tokens(self) -> None:
        """Check that the parts of ``rollout_tokens/`` can be read, and that those of the newest checkpoint are there,
        unchanged."""
        sealed = {name: facts for name, facts in self.marker.seals.items() if name.startswith(f"{TOKENS_FOLDER}/")}
        found = dict(damages(self.run_dir, sealed))
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
        resumed = self.history.resumed_at if self.history is not None else 0
        before = seconds[resumed - 1] if 0 < resumed <= len(seconds) else 0.0
        limit = before + self.history.wall + SLACK if self.history is not None and self.whole else np.inf
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
