"""The turns and forks of an episode, beside its tokens: parts of ``types.py``, which holds all else that travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Turn:
    """One sampled stretch of an episode, tokens ``start`` to ``end`` of its response, and what followed it: the tokens
    from ``end`` to the next turn's ``start`` were observed."""

    start: int
    end: int
    generator_id: str = ""
    tools: tuple[str, ...] = ()  # that were called after it
    seconds: float = 0.0  # of the environment's step after it
    failures: int = 0  # of its tool calls: malformed, unknown, raised or late
    reward: float | None = None  # of the turn, from an environment that rewards turns


@dataclass(frozen=True)
class Fork:
    """A branch that begins with token ``start`` of an episode's response: that token follows not the one before it in
    the row but the one at ``follows``, a position in the row counted from the prompt's first token. -1: it follows
    none, and begins a text of its own."""

    start: int
    follows: int


def wrong_fork(forks: Sequence[Fork], prompt: int, sampled: NDArray[np.bool_]) -> Fork | None:
    """The first that is out of order, follows no token before it, or leaves a sampled token without context; None if
    all are right. ``prompt``: tokens of the prompt; ``sampled`` [L]: of the response."""
    last = 0
    for fork in forks:
        inside = last < fork.start < len(sampled) and -1 <= fork.follows < prompt + fork.start - 1
        if not inside or (fork.follows < 0 and sampled[fork.start]):
            return fork
        last = fork.start
    return None


def followed(forks: Sequence[Fork], prompt: int, length: int) -> NDArray[np.int64]:
    """[length] the position of the token that each token of a row follows, -1 for none; ``prompt``: tokens of the
    prompt, which are the first ones."""
    found = np.arange(-1, length - 1)
    for fork in forks:
        found[prompt + fork.start] = fork.follows
    return found


def lineage(follows: NDArray[np.int64], last: int) -> NDArray[np.int64]:
    """The positions of token ``last`` of a row and of all tokens that it follows, in the text's order; none for -1.
    ``follows`` [n] as :func:`followed` gives it."""
    starts = np.flatnonzero(follows != np.arange(-1, len(follows) - 1))
    parts = [np.arange(0)]
    while last >= 0:
        number = np.searchsorted(starts, last, side="right")
        first = int(starts[number - 1]) if number else 0
        parts.append(np.arange(first, last + 1))
        last = int(follows[first])
    return np.concatenate(parts[::-1])


@dataclass(frozen=True)
class EpisodeFacts:
    """The controller's data of an episode's turns: their number, totals of the environment's steps after them, the
    oldest version in the first and in the last turn, and how often its row forks."""

    turns: int
    tool_seconds: float
    tool_calls: int
    tool_failures: int
    first_version: int
    last_version: int
    forks: int = 0
