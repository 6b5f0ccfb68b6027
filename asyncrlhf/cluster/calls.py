"""Who was asked for what, and when: the calls of a run whose answers are still to come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

START = "start"  # the verb of a call that waits for a process to be there, for as long as its own limit allows


@dataclass(eq=False)
class Call:
    """``name`` was asked for ``verb`` at ``since``, seconds of the run's clock; ``ids``: rollouts that it is about."""

    name: str
    verb: str
    since: float
    ids: Sequence[int]
    limit: asyncio.Timeout
    verdict: str = ""  # why it was ended before its limit
    over: bool = False  # the answer came, or the caller gave up

    def end(self, verdict: str) -> None:
        """Have the caller raise ReplicaError with this sentence now. The first verdict counts; none does after the call."""
        if not self.over and not self.verdict and not self.limit.expired():
            self.verdict = verdict
            self.limit.reschedule(asyncio.get_running_loop().time())


class Calls:
    """The calls under way, oldest first; :func:`keep_calls` makes the table of a run."""

    def __init__(self) -> None:
        self._open: dict[Call, None] = {}

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._open))

    def of(self, name: str) -> list[Call]:
        return [call for call in self._open if call.name == name]

    def add(self, call: Call) -> None:
        self._open[call] = None

    def remove(self, call: Call) -> None:
        self._open.pop(call, None)


_calls: ContextVar[Calls | None] = ContextVar("calls", default=None)


def keep_calls() -> Calls:
    """A fresh table, into which this task and all that it starts from now on enter their calls."""
    table = Calls()
    _calls.set(table)
    return table


@contextmanager
def under_way(name: str, verb: str, ids: Sequence[int], limit: asyncio.Timeout) -> Iterator[Call]:
    """Keep a call in the table for as long as this stands open."""
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
