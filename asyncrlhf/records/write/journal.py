"""``journal.jsonl``: the fate of every rollout and the other events of a run, in the order in which they happened.

Lines are only ever appended to the file, one JSON object each::

    {"n": 12, "event": "started", "at": 3.25, "ids": [8, 9, 10, 11], "replica": "generator-0", "version": 1}

``n`` counts the lines of the file from 0, ``at`` is in seconds of the run's clock. A run that continues from a
checkpoint undoes all later events by an ``undone`` line. :data:`EVENTS` lists the events.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import CheckpointError
from asyncrlhf.redaction import redact

JOURNAL_FILE = "journal.jsonl"
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
FULL_LINES = 4096  # noted since the last write: a long step does not keep more in memory
MAX_IDS = 1024  # in one line
WITH_ERRORS = ("died", "end")  # their reasons are sentences of errors, also of libraries

EVENTS = {
    "undone": "the lines from `line` to this one do not count: the run continues from a checkpoint before them",
    "begin": "the run begins, or continues from the checkpoint of `step`; the settings that decide what may train",
    "admitted": "`ids`, the rollouts of `group`, were admitted; `prompt`: its id",
    "started": "`ids` were given to `replica`, which held `version`; -1: it runs episodes, whose turns replicas sample",
    "finished": "`ids` were sampled completely and left their replica",
    "buffered": "`ids` have their reward, and reference log-probs and values if services compute them",
    "trained": "`ids` were trained on at policy `version`; `last`: for the last time",
    "retired": "`ids`, trained before, will not train again, for this `reason`; they end as trained",
    "dropped": "`ids` will never train, for this `reason`",
    "failed": "`ids` could not be sampled or scored, for this `reason`",
    "requeued": "`ids` lost their replica and wait to be sampled again",
    "step": "the learner completed `step`: the policy is at this version",
    "rested": "no rollout is under way before a checkpoint of `step`, whose weights are published even if none is due",
    "publish": "weights of `version` are on their way to `replicas`",
    "load": "`replica` is asked to load `version`",
    "loaded": "`replica` answered that it holds `version`",
    "published": "every live replica has loaded `version`",
    "died": "`replica`, or another worker of that name, is lost, for this `reason`; its rollouts are requeued",
    "joined": "`replica` takes work, at `version`: it was restarted, or is new",
    "bound": "the staleness `bound` in force from now on",
    "checkpoint": "the checkpoint of `step` is on disk",
    "rollback": "the learner died: the policy went from `version` back to `to`, uses at `to` and later do not count, "
    "rollouts that only they had ended are dropped as rolled_back; `epoch` began, and no replica holds a version",
    "returned": "`ids`, which had ended as trained, are in the buffer again: the rollback that follows undoes a use",
    "end": "the attempt ended, for this `reason`",
}


@dataclass(slots=True)
class Line:
    event: str
    at: float
    ids: list[int]
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self, number: int) -> str:
        ids = f',"ids":{self.ids}'.replace(" ", "") if self.ids else ""
        facts = f",{_encode(self.facts)[1:]}" if self.facts else "}"
        return f'{{"n":{number},"event":"{self.event}","at":{self.at:.6f}{ids}{facts}\n'


class Journal:
    """Keeps lines in memory until :meth:`write` appends them to ``path``; without a path they stay in memory.

    :meth:`note` and :meth:`mark` do no I/O and are called by the event loop's thread only; the others by any thread.
    """

    def __init__(self, path: Path | None = None, kept: int = 0) -> None:
        """``kept``: valid lines of the file; later ones are marked as undone. Raises CheckpointError if it has
        fewer."""
        self.clock: Callable[[], float] = time.monotonic
        self.full: Callable[[], object] = lambda: None  # called when enough lines wait to be written
        self._path = path
        self._written = 0 if path is None else whole_lines(path)
        if self._written < kept:
            raise CheckpointError(f"{path} has {self._written} lines but the checkpoint was made after {kept}.")
        self._lines = self._written  # with those in memory
        self._open: Line | None = None  # may still be given ids
        self._closed: deque[Line] = deque()
        self._writing = threading.Lock()
        if self._written > kept:
            self.note("undone", line=kept)
            self.mark()
            self.write()

    def note(self, event: str, *, ids: Sequence[int] = (), **facts: Any) -> None:
        """Append one event of :data:`EVENTS`. Values are JSON's and must not change afterwards. ``ids`` are added to
        the previous line if event and facts are the same."""
        if event in WITH_ERRORS:
            facts["reason"] = redact(facts["reason"])
        line = self._open
        if line is not None:
            if ids and line.event == event and line.facts == facts and 0 < len(line.ids) < MAX_IDS:
                line.ids.extend(ids)
                return
            self._closed.append(line)
        self._open = Line(event, self.clock(), list(ids), facts)
        self._lines += 1
        if self._lines % FULL_LINES == 0:
            self.full()

    def begin(self, step: int, config: RunConfig) -> None:
        """Note that the run begins (``step`` 0) or continues, with the settings that decide which rollouts train."""
        facts: dict[str, Any] = {
            "steps": config.steps,
            "batch_size": config.batch_size,
            "num_generations": config.num_generations,
            "publish_every": config.weights.publish_every,
            "async": asdict(config.async_),
            "buffer": asdict(config.buffer),
        }
        self.note("begin", step=step, **facts)
        self.mark()

    def mark(self) -> int:
        """The number of lines so far; the next :meth:`write` writes all of them."""
        if self._open is not None:
            self._closed.append(self._open)
            self._open = None
        return self._lines

    def write(self) -> None:
        """Append all complete lines to the file; after an OSError they all count as unwritten."""
        if self._path is None or not self._closed:
            return
        with self._writing, self._path.open("ab", buffering=0) as file:
            lines = [self._closed.popleft() for _ in range(len(self._closed))]
            text = "".join(line.text(self._written + i) for i, line in enumerate(lines))
            size, left = file.tell(), memoryview(text.encode("utf-8", "backslashreplace"))
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                self._closed.extendleft(reversed(lines))
                file.truncate(size)
                raise
            self._written += len(lines)

    def sync(self) -> None:
        """Write, and block until it is on disk."""
        self.write()
        if self._path is not None and self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

    def noted(self) -> list[dict[str, Any]]:
        """The lines in memory, as a reader of the file would get them."""
        lines = [*self._closed, *([self._open] if self._open is not None else [])]
        return [json.loads(line.text(self._written + i)) for i, line in enumerate(lines)]


def whole_lines(path: Path) -> int:
    """The lines of a journal, without an incomplete last one of a process that died while writing."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content.count(b"\n")
