"""Which tests a command runs: by the markers `more`, `thorough`, `more_but`, `thorough_but` and `in_turn`."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from pathlib import Path

import pytest

QUICK, REST = "not more and not thorough", "more and not thorough"  # what `make test` and `make test-more` choose
TURNS = 8


def turn_now() -> int | None:
    """That of ``TEST_TURN``, which `make test-all` sets by the commit; none: every costly case runs."""
    turn = os.environ.get("TEST_TURN", "all")
    if turn == "all":
        return None
    if turn not in map(str, range(TURNS)):
        raise pytest.UsageError(f"TEST_TURN={turn}: it must be all, or a number from 0 to {TURNS - 1}")
    return int(turn)


def turn_of(file: str) -> int:
    """By its name alone, so that other files do not change it; a file's cases share what is costly."""
    return zlib.crc32(file.encode()) % TURNS


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test will run are not imported: that takes some of them seconds of a processor."""
    chosen = config.getoption("markexpr")
    if chosen not in (QUICK, REST) or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    wholly, partly = re.search(r"^pytestmark = .*\bmark\.more\b", text, re.MULTILINE), "mark.more" in text
    return True if (wholly if chosen == QUICK else not partly) else None


@pytest.hookimpl(tryfirst=True)  # before those that `-m` does not choose are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``more_but("a", "b")``: the test's cases with one of these words in their ids, or with one of these ids, stay in
    `make test`, the others are `more`. ``more_but(every=4)``: every fourth stays. ``thorough_but`` likewise, of the
    cases that are `more`. ``in_turn``: cases that are `more` are `thorough` but at the turn of their file."""
    for name in ("more", "thorough"):
        cases: Counter[tuple[str, str]] = Counter()
        for item in items:
            mark = item.get_closest_marker(f"{name}_but")
            if mark is None or not isinstance(item, pytest.Function):
                continue
            if name == "thorough" and item.get_closest_marker("more") is None:
                continue
            case = cases[test := (item.nodeid.partition("[")[0], item.originalname)]
            cases[test] += 1
            words = item.callspec.id.split("-") if hasattr(item, "callspec") else []
            stays = case % mark.kwargs["every"] == 0 if mark.kwargs else {*words, "-".join(words)} & set(mark.args)
            if not stays:
                item.add_marker(name)
    turn = turn_now()
    for item in items if turn is not None else ():
        costly = item.get_closest_marker("in_turn") and item.get_closest_marker("more")
        if costly and turn_of(item.nodeid.partition("::")[0]) != turn:
            item.add_marker("thorough")
