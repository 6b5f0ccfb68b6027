"""A signal that reaches a run's process twice: by itself, and passed on by the process above."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from asyncrlhf import last_words

OWN, PASSED_ON = signal.SIGUSR1, last_words.PASSED_ON[signal.SIGUSR1]


@pytest.mark.parametrize(
    ("order", "count"),
    [
        ((OWN,), 1),
        ((PASSED_ON,), 1),
        ((OWN, PASSED_ON), 1),
        ((PASSED_ON, OWN), 1),
        ((OWN, OWN), 2),
        ((PASSED_ON, PASSED_ON), 2),
        ((PASSED_ON, OWN, PASSED_ON, OWN), 2),
        ((OWN, PASSED_ON, PASSED_ON, OWN), 2),
    ],
)
def test_a_signal_and_its_copy_count_once(
    order: Sequence[signal.Signals], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_words, "_seen", {})
    monkeypatch.setattr(last_words, "_passed", {})
    monkeypatch.setattr(last_words, "_last", signal.SIGINT)
    told: list[bool] = []
    handlers = {OWN: lambda number, _: told.append(last_words.seen(number)), PASSED_ON: last_words._passed_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        for number in order:
            os.kill(os.getpid(), number)
            os.getpid()  # handlers run between two instructions
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sum(told) == count and last_words.by_signal() == 128 + OWN
