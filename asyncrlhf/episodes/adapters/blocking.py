"""The base class of environments whose calls block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.episodes.environment import Environment, Step
from asyncrlhf.episodes.replies import ParsedReply


class BlockingEnvironment(Environment):
    """Its methods are no coroutines, so that each call gets a thread of its own, or runs in place on a virtual
    clock."""

    def reset(self, row: Mapping[str, Any]) -> str | None:  # type: ignore[override]
        raise NotImplementedError

    def step(self, reply: ParsedReply) -> Step:  # type: ignore[override]
        raise NotImplementedError

    def reward(self) -> float | None:  # type: ignore[override]
        return None

    def close(self) -> None:  # type: ignore[override]
        pass
