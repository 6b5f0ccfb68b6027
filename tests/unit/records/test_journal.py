"""The journal: cheap to note, appended whole or not at all, closed by a resume and never rewritten."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.errors import CheckpointError
from asyncrlhf.records.read.replay import Findings, Replay, read_journal, surviving
from asyncrlhf.records.write import journal as journal_module
from asyncrlhf.records.write.journal import EVENTS, Journal


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def filled(path: Path, events: int, kept: int = 0) -> Journal:
    journal = Journal(path, kept)
    for number in range(events):
        journal.note("step", step=number)
    journal.mark()
    journal.write()
    return journal


def test_ids_of_one_event_share_a_line_and_nothing_else_does(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.clock = lambda: 1.5
    for rollout_id in (4, 5):
        journal.note("started", ids=(rollout_id,), replica="g0", version=1)
    journal.note("started", ids=(6,), replica="g0", version=2)
    journal.note("step", step=1)
    journal.note("step", step=1)
    assert journal.mark() == 4
    journal.note("started", ids=(7,), replica="g0", version=2)
    journal.note("finished", ids=(7,))
    assert journal.mark() == 6
    journal.write()
    assert lines(tmp_path / "j") == [
        {"n": 0, "event": "started", "at": 1.5, "ids": [4, 5], "replica": "g0", "version": 1},
        {"n": 1, "event": "started", "at": 1.5, "ids": [6], "replica": "g0", "version": 2},
        {"n": 2, "event": "step", "at": 1.5, "step": 1},
        {"n": 3, "event": "step", "at": 1.5, "step": 1},
        {"n": 4, "event": "started", "at": 1.5, "ids": [7], "replica": "g0", "version": 2},
        {"n": 5, "event": "finished", "at": 1.5, "ids": [7]},
    ]


def test_a_mark_ends_the_line_so_that_a_checkpoint_lies_between_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.note("finished", ids=(1,))
    position = journal.mark()
    journal.note("finished", ids=(2,))
    journal.mark()
    journal.write()
    assert position == 1 and [line["ids"] for line in lines(tmp_path / "j")] == [[1], [2]]


def test_what_no_json_holds_is_written_as_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.note("failed", ids=(1,), reason='says "no"\n\ud800', where=tmp_path)
    journal.mark()
    journal.write()
    assert lines(tmp_path / "j")[0]["reason"] == 'says "no"\n\ud800'
    assert lines(tmp_path / "j")[0]["where"] == str(tmp_path)


def test_a_torn_line_goes_and_the_lines_after_a_checkpoint_are_undone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path, 5)
    with path.open("a") as file:
        file.write('{"n":5,"ev')
    filled(path, 3, kept=2)  # goes on from the checkpoint after 2 lines
    assert [line["n"] for line in lines(path)] == list(range(9))
    assert lines(path)[5]["event"] == "undone" and lines(path)[5]["line"] == 2
    assert surviving(path) == ([(0, 2), (6, 9)], 9)
    filled(path, 1, kept=8)
    assert surviving(path) == ([(0, 2), (6, 8), (10, 11)], 11)
    filled(path, 1, kept=1)  # from an older one than before
    assert surviving(path) == ([(0, 1), (12, 13)], 13)
    found = Findings()
    assert [number for number, _ in read_journal(path, found)] == [0, 12] and found.sentences() == []


def test_a_checkpoint_that_an_undone_attempt_went_past_counts_all_before_it(tmp_path: Path) -> None:
    """The resume went from 2 while 4 was damaged; then 4 was mended, and another resume goes from it."""
    path = tmp_path / "j"
    filled(path, 5)
    filled(path, 3, kept=2)
    filled(path, 1, kept=4)
    assert surviving(path) == ([(0, 4), (10, 11)], 11)


def test_a_journal_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "j", 3)
    with pytest.raises(CheckpointError, match="has 3 lines but the checkpoint was made after 4"):
        Journal(tmp_path / "j", kept=4)


def test_a_full_disk_leaves_whole_lines_and_what_follows_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    journal = filled(path, 2)

    class Full:
        """Takes ten bytes and then no more."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "no space left")
            self.room = 0
            return int(self.file.write(data[:10]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    original = Path.open
    journal.note("step", step=7)
    journal.mark()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *a, **k: Full(original(self, *a, **k)))
        with pytest.raises(OSError, match="no space left"):
            journal.write()
    assert len(lines(path)) == 2
    journal.write()
    assert [line.get("step") for line in lines(path)] == [0, 1, 7]


def test_memory_stays_bounded_in_a_long_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FULL_LINES", 10)
    journal = Journal(tmp_path / "j")
    journal.full = journal.write
    for number in range(95):
        journal.note("step", step=number)
        assert len(journal.noted()) <= 10
    assert len(lines(tmp_path / "j")) >= 80


def test_every_event_that_is_replayed_is_one_that_there_is() -> None:
    handled = {name.removeprefix("_on_") for name in vars(Replay) if name.startswith("_on_")}
    assert handled <= EVENTS.keys() and EVENTS.keys() - handled == {"undone"}
