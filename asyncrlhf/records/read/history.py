"""Reads a run's journal: its valid lines, and the history that ``records/read/replay.py`` builds from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.buffer.async_config import SETTABLE, AsyncConfig, BufferConfig

SHOWN = 8  # ids named in one sentence
ADMITTED, GENERATING, SCORING, BUFFERED, TRAINED, DROPPED, FAILED = range(7)
STATES = ("admitted", "generating", "scoring", "buffered", "trained", "dropped", "failed")
LIVE = (ADMITTED, GENERATING, SCORING, BUFFERED)


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
        """From a ``begin`` line, or from a run's config with ``publish_every`` added; unknown keys are ignored."""
        asynchrony = AsyncConfig(**_known(AsyncConfig, as_given(given["async"])))
        numbers = {name: given[name] for name in ("steps", "batch_size", "num_generations", "publish_every")}
        return cls(**numbers, asynchrony=asynchrony, buffer=BufferConfig(**_known(BufferConfig, given["buffer"])))

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.num_generations

    @property
    def scheduled(self) -> bool:
        return self.asynchrony.fixed_lag is not None


def as_given(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``async`` of a run's config.yaml, which has the values in force, without those that its mode set."""
    mode = recorded.get("mode")
    return {key: value if SETTABLE.get(key, mode) == mode else None for key, value in recorded.items()}


def _known(schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key in schema.__dataclass_fields__}  # type: ignore[attr-defined]


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
