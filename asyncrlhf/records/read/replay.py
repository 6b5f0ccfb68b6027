"""Replays a run's journal: its valid lines, the state of each rollout, the batch of each step, the version of each
replica."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.types import OBSERVED

SHOWN = 8  # ids named in one sentence
ADMITTED, GENERATING, SCORING, BUFFERED, TRAINED, DROPPED, FAILED = range(7)
STATES = ("admitted", "generating", "scoring", "buffered", "trained", "dropped", "failed")
LIVE = (ADMITTED, GENERATING, SCORING, BUFFERED)
# Of an episode: the version that each replica held when it began, and the one that each was last asked to load before
# it finished (None before).
Weights = tuple[Mapping[str, int], Mapping[str, int] | None]


class Findings:
    """Broken guarantees. A finding about many rollouts is one sentence that names the first of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def add(self, sentence: str, *which: Any) -> None:
        """Add a finding; ``sentence`` has ``{ids}`` where the ids belong, if it names any."""
        self._found.setdefault(sentence, []).extend(which)

    def sentences(self) -> list[str]:
        return [sentence.replace("{ids}", _named(which)) for sentence, which in self._found.items()]


def _named(which: Sequence[Any]) -> str:
    shown = ", ".join(map(str, which[:SHOWN]))
    return f"{shown} and {len(which) - SHOWN} more" if len(which) > SHOWN else shown


@dataclass(frozen=True)
class Rules:
    """The guarantees that the settings of one attempt give."""

    steps: int
    batch_size: int
    num_generations: int
    publish_every: int
    asynchrony: AsyncConfig
    buffer: BufferConfig

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Rules:
        """From a ``begin`` line."""
        numbers = {name: given[name] for name in ("steps", "batch_size", "num_generations", "publish_every")}
        return cls(**numbers, asynchrony=AsyncConfig(**given["async"]), buffer=BufferConfig(**given["buffer"]))

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.num_generations

    @property
    def scheduled(self) -> bool:
        return self.asynchrony.fixed_lag is not None


@dataclass(frozen=True)
class Step:
    """One learner step: ``number`` is the version that it made."""

    number: int
    rollouts: int
    rules: Rules
    bound: int  # in force for its batch
    resumed_at: int  # where the attempt began


@dataclass
class History:
    """The facts of the valid lines, those of each rollout by its id."""

    found: Findings
    state: bytearray = field(default_factory=bytearray)
    uses: list[tuple[int, int]] = field(default_factory=list)  # rollout id, version
    started: list[tuple[str, int]] = field(default_factory=list)  # replica and the version that it held, "" before
    newest: list[int] = field(default_factory=list)  # that its replica was asked to load before it finished; -1 before
    episodes: dict[int, Weights] = field(default_factory=dict)  # by rollout id
    dropped: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    steps: list[Step] = field(default_factory=list)
    attempts: int = 0
    publishes: int = 0
    last_published: int = -1  # that all live replicas have
    lines: int = 0
    last_line: int = -1
    ended: str | None = None  # the reason of the last attempt's end; None: it was killed, or still runs
    open_publish: int | None = None
    resumed_at: int = 0  # the step from which the last attempt went on, whether or not it made another
    wall: float = 0.0  # seconds from the last attempt's begin to its last line
    totals_at: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number of lines

    def totals(self) -> dict[str, Any]:
        """The totals under the names of summary.json."""
        return {
            "admitted": len(self.state),
            "trained": self.state.count(TRAINED),
            "uses": len(self.uses),
            "dropped": {reason: count for reason, count in self.dropped.items() if count},
            "failed": self.failed,
            "left": sum(self.state.count(state) for state in LIVE),
        }


def read_journal(path: Path, found: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
    """The valid lines, with their numbers; an incomplete last line is ignored."""
    spans, total = surviving(path)
    with path.open("rb") as file:
        for number, raw in enumerate(file):
            if number >= total:
                return
            if not any(start <= number < end for start, end in spans):
                continue
            try:
                line = json.loads(raw)
                at_its_place = line["n"] == number and isinstance(line["event"], str)
            except (ValueError, KeyError, TypeError):
                found.add("journal.jsonl: line {ids} is not an event.", number)
                continue
            if not at_its_place:
                said = f"journal.jsonl: line {number} has the number {line['n']}: lines are missing or were added."
                found.add(said)
                return
            yield number, line


def surviving(path: Path) -> tuple[list[tuple[int, int]], int]:
    """Ranges of lines that no later line undoes, in order; and the number of complete lines."""
    undone: list[tuple[int, int]] = []
    total = 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            if b'"event":"undone"' in raw:
                undone.append((int(json.loads(raw)["line"]), total))
            total += 1
    spans: list[tuple[int, int]] = []
    end = total
    for first, last in reversed(undone):
        if last < end:
            spans.append((last + 1, end))
            end = first
    return [(0, end), *reversed(spans)], total


class Replay:
    """Processes the lines one by one; every event in a wrong state is a finding."""

    def __init__(self, found: Findings, marked: Iterable[int] = ()) -> None:
        """``marked``: numbers of lines after which the totals are stored."""
        self.history = History(found)
        self._found = found
        self._marked = set(marked)
        self._held: dict[str, int] = {}  # by live replica: the version it said that it holds
        self._asked: dict[str, int] = {}  # ... and the one that it was last asked to load
        self._ever: dict[str, int] = {}  # ... also by replicas that died since
        self._workers: set[str] = set()  # live ones that run episodes
        self._copies: dict[str, dict[str, int]] = {}
        self._awaited: set[str] = set()  # members of the publish under way that have not answered
        self._last_use: dict[int, int] = {}  # of live rollouts that were trained
        self._use_counts: Counter[int] = Counter()
        self._batch: list[int] = []
        self._closed: set[int] = set()
        self._version = self._resumed_at = self._bound = 0
        self._published = self._rested = -1
        self._rules: Rules | None = None
        self._began_at = 0.0

    def of(self, lines: Iterable[tuple[int, dict[str, Any]]]) -> History:
        history = self.history
        for number, line in lines:
            if history.last_line + 1 in self._marked:
                history.totals_at[history.last_line + 1] = history.totals()
            history.lines, history.last_line = history.lines + 1, number
            handler = getattr(self, f"_on_{line['event']}", None)
            if handler is not None:
                try:
                    handler(line)
                except (KeyError, TypeError, ValueError):
                    self._found.add("journal.jsonl: line {ids} lacks a field of its event.", number)
            history.wall = line.get("at", 0.0) - self._began_at
        return history

    @property
    def _now(self) -> Rules:
        if self._rules is None:
            raise KeyError("begin")
        return self._rules

    # --- attempts

    def _on_begin(self, line: dict[str, Any]) -> None:
        self._rules = Rules.of(line)
        if line["step"] != self._version:
            self._found.add(
                f"journal.jsonl: an attempt goes on from step {line['step']}, but the lines that it builds on end "
                f"with step {self._version}."
            )
        self._version = self._resumed_at = self.history.resumed_at = line["step"]
        self._bound = self._rules.asynchrony.bound
        self._held, self._asked, self._awaited, self._batch = {}, {}, set(), []
        self._ever, self._workers = {}, set()
        self._published = -1
        self.history.open_publish = None
        self.history.ended = None
        self.history.attempts += 1
        self._began_at = line["at"]

    def _on_rollback(self, line: dict[str, Any]) -> None:
        """Uses at ``to`` and later do not count, and no replica holds a version until it loads one of the new epoch.
        The remaining rollouts have no token of an undone version."""
        history, to = self.history, line["to"]
        if not 0 <= to <= self._version:
            self._found.add(f"journal.jsonl: the learner went back from step {self._version} to step {to}.")
        undone = {i for i, version in history.uses if version >= to}
        history.uses = [(i, version) for i, version in history.uses if version < to]
        kept: dict[int, list[int]] = {}
        for i, version in history.uses:
            if i in undone:
                kept.setdefault(i, []).append(version)
        for i in undone:
            if history.state[i] == TRAINED and i not in kept:
                history.state[i] = DROPPED
                history.dropped["rolled_back"] += 1
            elif history.state[i] == BUFFERED:
                self._use_counts[i] = len(kept.get(i, ()))
                self._last_use.pop(i, None)
                if i in kept:
                    self._last_use[i] = kept[i][-1]
        for i, state in enumerate(history.state):
            if state in LIVE:
                history.newest[i] = min(history.newest[i], to)
                held, asked = history.episodes.get(i, ({}, None))
                if asked is not None:
                    history.episodes[i] = held, {name: min(version, to) for name, version in asked.items()}
        history.steps = [step for step in history.steps if step.number <= to]
        self._version, self._batch = to, []
        self._asked = {replica: min(version, to) for replica, version in self._asked.items()}
        self._ever, self._workers = {replica: min(version, to) for replica, version in self._ever.items()}, set()
        self._held, self._awaited, self._published, history.open_publish = {}, set(), -1, None

    def _on_bound(self, line: dict[str, Any]) -> None:
        if not 0 <= line["bound"] <= self._now.asynchrony.bound:
            self._found.add(f"journal.jsonl: a staleness bound of {line['bound']} came into force, over the settings'.")
        self._bound = line["bound"]

    def _on_end(self, line: dict[str, Any]) -> None:
        self.history.ended = line["reason"]

    # --- rollouts

    def _move(self, line: dict[str, Any], to: int, *allowed: int) -> Iterator[int]:
        """Move the line's rollouts to state ``to``; returns the ids whose state allowed it."""
        state = self.history.state
        for rollout_id in line["ids"]:
            if not 0 <= rollout_id < len(state):
                self._found.add(f"journal.jsonl: rollouts {{ids}} were {line['event']} and never admitted.", rollout_id)
                continue
            if state[rollout_id] not in allowed:
                was = STATES[state[rollout_id]]
                self._found.add(
                    f"journal.jsonl: rollouts {{ids}} were {line['event']} while they were {was}.", rollout_id
                )
                continue
            state[rollout_id] = to
            yield rollout_id

    def _on_admitted(self, line: dict[str, Any]) -> None:
        history, size = self.history, self._now.num_generations
        for rollout_id in line["ids"]:
            if rollout_id != len(history.state) or rollout_id // size != line["group"]:
                self._found.add("journal.jsonl: rollouts {ids} were admitted out of order.", rollout_id)
                continue
            history.state.append(ADMITTED)
            history.started.append(("", -1))
            history.newest.append(-1)

    def _on_started(self, line: dict[str, Any]) -> None:
        replica, version = line["replica"], line["version"]
        held = self._held.get(replica)
        for rollout_id in self._move(line, GENERATING, ADMITTED):
            self.history.started[rollout_id] = (replica, version)
            if version == OBSERVED:  # it has no weights: it runs the episode, whose turns replicas sample
                self._workers.add(replica)
                self.history.episodes[rollout_id] = self._copy("held", self._held), None
            elif held != version:
                holds = "was not there" if held is None else f"held version {held}"
                said = f"journal.jsonl: rollouts {{ids}} were given to {replica} as version {version}, but it {holds}."
                self._found.add(said, rollout_id)

    def _on_finished(self, line: dict[str, Any]) -> None:
        for rollout_id in self._move(line, SCORING, GENERATING):
            replica = self.history.started[rollout_id][0]
            if replica not in self._asked and replica not in self._workers:
                self._found.add(f"journal.jsonl: rollouts {{ids}} finished on {replica}, which was dead.", rollout_id)
            if rollout_id in self.history.episodes:
                held, _ = self.history.episodes[rollout_id]
                self.history.episodes[rollout_id] = held, self._copy("ever", self._ever)
            self.history.newest[rollout_id] = self._asked.get(replica, -1)

    def _copy(self, name: str, versions: dict[str, int]) -> Mapping[str, int]:
        """A copy of ``versions``: the previous one of this name as long as it is the same."""
        if self._copies.get(name) != versions:
            self._copies[name] = dict(versions)
        return self._copies[name]

    def _on_buffered(self, line: dict[str, Any]) -> None:
        for _ in self._move(line, BUFFERED, SCORING):
            pass

    def _on_requeued(self, line: dict[str, Any]) -> None:
        for rollout_id in self._move(line, ADMITTED, GENERATING, SCORING):
            replica = self.history.started[rollout_id][0]
            if replica in self._held or replica in self._workers:
                self._found.add(f"journal.jsonl: rollouts {{ids}} were requeued although {replica} lives.", rollout_id)
            self.history.episodes.pop(rollout_id, None)
            self.history.started[rollout_id] = ("", -1)
            self.history.newest[rollout_id] = -1

    def _on_trained(self, line: dict[str, Any]) -> None:
        version, most = line["version"], self._now.buffer.max_reuse
        if version != self._version:
            said = f"journal.jsonl: rollouts {{ids}} were trained at version {version}, when it was {self._version}."
            self._found.add(said, *line["ids"])
        for rollout_id in self._move(line, TRAINED if line["last"] else BUFFERED, BUFFERED):
            if version <= self._last_use.get(rollout_id, -1):
                self._found.add(f"journal.jsonl: rollouts {{ids}} were trained twice at version {version}.", rollout_id)
            self._last_use[rollout_id] = version
            self._use_counts[rollout_id] += 1
            if self._use_counts[rollout_id] > most:
                self._found.add(
                    f"journal.jsonl: rollouts {{ids}} were trained over buffer.max_reuse={most}.", rollout_id
                )
            self.history.uses.append((rollout_id, version))
            self._batch.append(rollout_id)
            if line["last"]:
                del self._last_use[rollout_id], self._use_counts[rollout_id]

    def _on_retired(self, line: dict[str, Any]) -> None:
        for rollout_id in self._move(line, TRAINED, BUFFERED):
            if self._last_use.pop(rollout_id, None) is None:
                self._found.add("journal.jsonl: rollouts {ids} count as trained and never were.", rollout_id)
            self._use_counts.pop(rollout_id, None)

    def _on_returned(self, line: dict[str, Any]) -> None:
        for _ in self._move(line, BUFFERED, TRAINED):
            pass

    def _on_dropped(self, line: dict[str, Any]) -> None:
        for rollout_id in self._move(line, DROPPED, *LIVE):
            self.history.dropped[line["reason"]] += 1
            if rollout_id in self._last_use:
                self._found.add("journal.jsonl: rollouts {ids} count as dropped and were trained.", rollout_id)

    def _on_failed(self, line: dict[str, Any]) -> None:
        self.history.failed += sum(1 for _ in self._move(line, FAILED, ADMITTED, GENERATING, SCORING))

    # --- steps

    def _on_step(self, line: dict[str, Any]) -> None:
        step, rules = line["step"], self._now
        if step != self._version + 1:
            self._found.add(f"journal.jsonl: step {step} follows step {self._version}.")
        self._check_batch(step, rules)
        self.history.steps.append(Step(step, len(self._batch), rules, self._bound, self._resumed_at))
        self._version, self._batch = step, []

    def _check_batch(self, step: int, rules: Rules) -> None:
        """Check that the batch has the right number of whole groups, lacking only siblings that failed or were
        dropped."""
        size, due = rules.num_generations, rules.groups_per_step
        batch = set(self._batch)
        groups = {i // size for i in batch}
        scheduled = range((step - 1) * due, step * due) if rules.scheduled else None
        if scheduled is not None and not groups <= set(scheduled):
            strange = sorted(groups - set(scheduled))
            self._found.add(
                f"journal.jsonl: step {step} trained groups {{ids}}, which belong to other steps.", *strange
            )
        if scheduled is None and len(groups) != due:
            self._found.add(f"journal.jsonl: step {step} trained {len(groups)} groups, where a batch has {due}.")
        state = self.history.state
        for group in scheduled if scheduled is not None else groups:
            for i in range(group * size, (group + 1) * size):
                if i not in batch and (i >= len(state) or state[i] not in (DROPPED, FAILED)):
                    self._found.add(f"journal.jsonl: step {step} trained without rollouts {{ids}} of its batch.", i)

    # --- weights

    def _on_rested(self, line: dict[str, Any]) -> None:
        self._rested = line["step"]

    def _on_publish(self, line: dict[str, Any]) -> None:
        version, rules, before = line["version"], self._now, self._published
        if self.history.open_publish is not None:
            said = (
                f"journal.jsonl: version {self.history.open_publish} was still on its way when {version} was published."
            )
            self._found.add(said)
        if version <= before:
            self._found.add(f"journal.jsonl: version {version} was published after version {before}.")
        elif not self._resumed_at <= version <= self._version:
            self._found.add(f"journal.jsonl: version {version} was published when it was {self._version}.")
        # A free run may delay a publish; the next one then replaces it, at any version.
        every = rules.publish_every
        due = before < 0 or version in (rules.steps, self._rested) or version // every > before // every
        if not due or (
            rules.scheduled and before >= 0 and version != min(before - before % every + every, rules.steps)
        ):
            self._found.add(
                f"journal.jsonl: version {version} was published after {before}, against publish_every={every}."
            )
        self.history.open_publish, self._published = version, version
        # With pull a version is published when the machines hold it; replicas load it later, or never.
        self._awaited = set() if rules.asynchrony.on_weight_update == "pull" else set(line["replicas"])
        self.history.publishes += 1

    def _on_load(self, line: dict[str, Any]) -> None:
        replica, version = line["replica"], line["version"]
        if version > self._published or version < self._asked.get(replica, -1):
            said = f"journal.jsonl: {replica} was asked to load version {version}; {self._published} was published."
            self._found.add(said)
        self._asked[replica] = self._ever[replica] = version

    def _on_loaded(self, line: dict[str, Any]) -> None:
        replica, version = line["replica"], line["version"]
        if self._asked.get(replica) != version:
            self._found.add(f"journal.jsonl: {replica} loaded version {version}, which it was not asked to.")
        self._held[replica] = version
        if version == self.history.open_publish:
            self._awaited.discard(replica)

    def _on_published(self, line: dict[str, Any]) -> None:
        version = line["version"]
        if version != self.history.open_publish:
            self._found.add(f"journal.jsonl: version {version} was published without a publish under way.")
        for replica in sorted(self._awaited):
            self._found.add(
                f"journal.jsonl: version {version} was published, but {{ids}} never acknowledged it.", replica
            )
        self.history.open_publish, self._awaited = None, set()
        self.history.last_published = version

    def _on_died(self, line: dict[str, Any]) -> None:
        for replicas in (self._held, self._asked):
            replicas.pop(line["replica"], None)
        self._awaited.discard(line["replica"])
        self._workers.discard(line["replica"])

    def _on_joined(self, line: dict[str, Any]) -> None:
        if self._held.get(line["replica"]) != line["version"]:
            self._found.add(
                f"journal.jsonl: {line['replica']} joined at version {line['version']}, but did not load it."
            )

    def _on_checkpoint(self, line: dict[str, Any]) -> None:
        if line["step"] > self._version:
            self._found.add(f"journal.jsonl: a checkpoint of step {line['step']} came before that step.")
