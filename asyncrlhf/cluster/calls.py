"""The table of a run's unanswered calls: which part, which verb, since when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

START = "start"  # the verb of a call that waits for a process to be there, for as long as its own limit allows


@dataclass(eq=False)
class Call:
    """A call of ``verb`` on the part ``name`` at ``since``, seconds of the run's clock; ``ids``: its rollouts."""

    name: str
    verb: str
    since: float
    ids: Sequence[int]
    limit: asyncio.Timeout
    verdict: str = ""  # why it was ended before its limit
    over: bool = False  # the answer came, or the caller gave up

    def end(self, verdict: str) -> None:
        """Make the caller raise ReplicaError with this sentence now; only the first counts, and none after the call."""
        if not self.over and not self.verdict and not self.limit.expired():
            self.verdict = verdict
            self.limit.reschedule(asyncio.get_running_loop().time())


class Calls:
    """The unanswered calls, oldest first; :func:`keep_calls` creates a run's table."""

    def __init__(self) -> None:
        self._open: dict[Call, None] = {}
        self.made = 0  # in all

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._open))

    def of(self, name: str) -> list[Call]:
        return [call for call in self._open if call.name == name]

    def add(self, call: Call) -> None:
        self._open[call] = None
        self.made += 1

    def remove(self, call: Call) -> None:
        self._open.pop(call, None)


_calls: ContextVar[Calls | None] = ContextVar("calls", default=None)


def keep_calls() -> Calls:
    """A new table, in which this task and all tasks that it starts from now on enter their calls."""
    table = Calls()
    _calls.set(table)
    return table


def calls_made() -> int:
    """The calls that this task's table has counted so far; 0 without a table."""
    table = _calls.get()
    return 0 if table is None else table.made


@contextmanager
def under_way(name: str, verb: str, ids: Sequence[int], limit: asyncio.Timeout) -> Iterator[Call]:
    """Keep a call in the table within this context."""
    call = Call(name, verb, asyncio.get_running_loop().time(), ids, limit)
    table = _calls.get()
    if table is not None:
        table.add(call)
    try:
        yield call
    finally:
        call.over = True
        if table is not None:
            table.remove(call)
