"""The turns of an episode, beside its tokens: parts of ``types.py``, which holds everything else that travels."""

from __future__ import annotations

from dataclasses import dataclass


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
class EpisodeFacts:
    """The controller's data of an episode's turns: their number, totals of the environment's steps after them, and the
    oldest version in the first and in the last turn."""

    turns: int
    tool_seconds: float
    tool_calls: int
    tool_failures: int
    first_version: int
    last_version: int
